"""Tables that are read by row, by a config: against real modules."""

from pathlib import Path

import pytest
from torch import nn

from artifacts.errors import BadInput
from artifacts.modelshapes.known import ModelShape, read_config
from artifacts.modelshapes.memory import backbone_memory, from_config
from artifacts.modelshapes.row_tables import row_tables
from artifacts.shape import Shape
from tools.make.families import tiny


@pytest.mark.parametrize("family", ["qwen4_exp_text", "gemma4_text", "mixtral"])
def test_tables_are_those_of_the_module(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    tables = list(row_tables(read_config(path), path))
    theirs = {
        name.removeprefix("model."): tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not name.endswith("embed_tokens")
    }
    assert {name: columns for name, _, columns in tables} == {
        name: columns for name, (_, columns) in theirs.items()
    }
    # heads of n-grams have prime numbers of rows, and all together a multiple of 128
    assert all(rows <= theirs[name][0] < rows + 128 for name, rows, _ in tables)
    shape = ModelShape(family, Shape(2, 4, 2, 1), 32, vocabulary=96)
    memory = backbone_memory(shape, from_config(path))
    assert memory.tables_nbytes == sum(2 * rows * columns for _, rows, columns in tables)
    assert bool(tables) == (family != "mixtral")


def test_a_config_that_does_not_say_how_large() -> None:
    with pytest.raises(BadInput, match="ple_layer_ids"):
        list(row_tables({"ple_layer_ids": ["1"], "hidden_size": 32}, Path("config.json")))
    with pytest.raises(BadInput, match="vocab_size_per_layer_input"):
        fields = {"hidden_size_per_layer_input": 8, "num_hidden_layers": 2}
        list(row_tables(fields, Path("config.json")))
