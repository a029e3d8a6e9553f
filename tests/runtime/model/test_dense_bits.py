"""Linear layers quantised while a checkpoint is read: which, from what, one at a time; and what is
refused."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from artifacts.errors import BadInput, BadUsage
from artifacts.formats.dense import DENSE
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.gguf.ggml_encoding import encode
from runtime.model.open import open_model
from runtime.model.quantised.dense_bits import DenseQuantiser
from runtime.model.quantised.quantised_linear import QuantisedEmbedding, QuantisedLinear
from tests.conftest import Checkpoint
from tests.helpers import families
from tests.helpers.families import FAMILIES
from tests.runtime.session.test_session import plain_model


@pytest.mark.parametrize("bits", DENSE)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_those_of_the_checkpoint_rounded_once(
    family: str, bits: int, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family)
    plain = plain_model(folder)
    opened = open_model(str(folder), dense=bits)
    routers = {module for layer in opened.layers for module in layer.gate.modules()}
    packed = left = 0
    for name, module in opened.model.named_modules():
        if isinstance(module, QuantisedLinear | QuantisedEmbedding):
            theirs = plain.get_submodule(name)
            assert torch.equal(module.blocks, encode(theirs.weight, GGML[DENSE[bits].name]))
            assert getattr(theirs, "bias", None) is None or torch.equal(module.bias, theirs.bias)
            assert module not in routers
            packed += isinstance(module, QuantisedLinear)
        elif isinstance(module, nn.Linear) and module not in routers:
            assert module.in_features % 32 or module.out_features < 32
            assert torch.equal(module.weight, plain.get_submodule(name).weight)
            left += 1
    assert opened.dense == (bits, packed, left) and packed > 1
    plain_embedding = type(opened.model.get_input_embeddings()) is nn.Embedding
    assert plain_embedding != (family == "qwen2_moe")  # which ties it to the head
    others = {
        name: value
        for name, value in opened.model.named_parameters()
        if not name.endswith("blocks")
    }
    for name, value in others.items():
        assert value.is_meta or torch.equal(value, plain.get_parameter(name)), name


def test_a_shared_matrix_is_held_once(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("qwen2_moe")), dense=8)
    embedding = opened.model.get_input_embeddings()
    head = opened.model.get_output_embeddings()
    assert embedding.blocks is head.blocks and torch.equal(embedding.weight, head.weight)
    ids = torch.tensor([[5, 0, 5]])
    assert torch.equal(embedding(ids), embedding.weight[ids])


def test_one_matrix_is_whole_at_a_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref] = []
    most = 0
    convert = DenseQuantiser.convert

    def counted(self: DenseQuantiser, tensors: dict, **named: object) -> dict:
        nonlocal most
        alive.extend(
            weakref.ref(value[0] if isinstance(value, list) else value)
            for value in tensors.values()
        )
        most = max(most, sum(ref() is not None for ref in alive))
        return convert(self, tensors, **named)

    monkeypatch.setattr(DenseQuantiser, "convert", counted)
    opened = open_model(str(checkpoint("olmoe")), dense=4)
    assert len(alive) == opened.dense.num_packed and most == 1
    assert sum(ref() is not None for ref in alive) == 0


Change = Callable[[dict[str, torch.Tensor]], None]


def _changed(folder: Path, change: Change, tmp_path: Path) -> str:
    """The checkpoint with other tensors."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return str(tmp_path)


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 4] = torch.nan


def _too_large(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][0, 0] = 1e9


def _wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:40].clone()


def _missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_not_finite, "q_proj.weight holds NaN or infinity, or numbers beyond"),
        (_too_large, "lm_head.weight holds NaN or infinity, or numbers beyond"),
        (_wrong_shape, r"lm_head.weight has shape \[40, 32\] where the config asks for \[96, 32\]"),
        (_missing, "lm_head.weight is missing from the checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    change: Change, why: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=why):
        open_model(_changed(checkpoint("olmoe"), change, tmp_path), dense=8)


def test_other_widths_and_models_without_blocks_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(BadUsage, match="--dense 3 is no width"):
        open_model(str(checkpoint("olmoe")), dense=3)
    narrow = families.save(
        "olmoe", "hub", tmp_path / "narrow", fields={"hidden_size": 24, "num_key_value_heads": 4}
    )
    with pytest.raises(
        BadInput, match="--dense 8: no linear layer of this model has rows of whole blocks of 32"
    ):
        open_model(str(narrow), dense=8)


def test_matrices_tied_otherwise_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ScaledEmbedding(nn.Embedding):
        pass

    model = FAMILIES["qwen2_moe"]()[1]
    embedding = model.get_input_embeddings()
    embedding.__class__ = ScaledEmbedding
    with pytest.raises(
        BadInput, match="lm_head and model.embed_tokens share a matrix and are not all of a kind"
    ):
        DenseQuantiser(model, 8, ()).finish()
