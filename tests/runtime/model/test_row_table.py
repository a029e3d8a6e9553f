"""Tables whose rows are read from files: the numbers of a plain embedding to the bit, in every
format; rows kept; what is refused; and memory."""

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen4_exp.modeling_qwen4_exp import _find_nth_prime_after

from artifacts.errors import BadInput
from artifacts.formats.base import Format
from artifacts.formats.fp8 import Scaled
from artifacts.formats.gguf.ggml import GGML
from artifacts.formats.integers.awq import Awq
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.mxfp4 import MxFp4
from artifacts.formats.nvfp4 import NvFp4
from runtime.model.files import expert_tensors, row_table
from runtime.model.files.checkpoint import StoredTensor, open_checkpoint
from runtime.model.files.row_table import StoredRows, has_rows, tables_of
from runtime.model.gguf.shape import gguf_shape
from runtime.model.open import open_model
from runtime.model.quantised.quantised_tensor import QuantisedTensor
from runtime.session.session import Session, Settings
from tests.helpers.gguf_files import blocks, every, write
from tests.helpers.published import MAKERS, Maker, fp8, publish
from tests.helpers.safetensors import joined, parsed
from tests.helpers.triton_process import interpret, needs_triton
from tests.runtime.model.test_families import IDS, logits, offloaded, reference, save
from tools.make.families import tiny

WIDTH = 256
HEIGHTS = (40, 24)  # rows of the two matrices of a table
ASKED = torch.tensor([0, 15, 16, 39, 40, 41, 63])
Tensors = dict[str, torch.Tensor]


def plain(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    return {"": torch.randn(rows, columns, generator=generator)}


def fp8_of_rows(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    return fp8(rows, columns, generator, block=0)


def fp8_of_matrix(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    return fp8(rows, columns, generator) | {"scale": torch.tensor(0.3)}


def of_type(name: str) -> Maker:
    def make(rows: int, columns: int, generator: torch.Generator) -> Tensors:
        drawn = torch.from_numpy(blocks(name, rows * columns // GGML[name].num_weights))
        return {"blocks": drawn.reshape(rows, -1)}

    return make


STORED: dict[str, tuple[Format | None, Maker]] = {
    "plain": (None, plain),
    "fp8 of blocks": (Scaled(block=(16, 16)), fp8),
    "fp8 of rows": (Scaled(), fp8_of_rows),
    "fp8 of matrices": (Scaled(), fp8_of_matrix),
    "mxfp4": (MxFp4(), MAKERS["mxfp4"]),
    "nvfp4": (NvFp4(), MAKERS["nvfp4"]),
    "nvfp4, inverse": (NvFp4(is_inverse=True), MAKERS["nvfp4"]),
    "pack-quantized": (PackedIntegers(), MAKERS["compressed-tensors"]),
    **{name: (form, of_type(name)) for name, form in GGML.items()},
}


def store(
    folder: Path, form: Format | None, matrices: Sequence[Tensors]
) -> list[StoredTensor | QuantisedTensor]:
    """Write matrices to a file, and return them as they are stored there."""
    named = {
        f"{number}.{role}": tensor
        for number, tensors in enumerate(matrices)
        for role, tensor in tensors.items()
    }
    save_file(named, folder / "model.safetensors")
    found = open_checkpoint(folder).tensors
    stored = []
    for number, tensors in enumerate(matrices):
        components = {role: found[f"{number}.{role}"] for role in tensors}
        stored.append(
            QuantisedTensor("table", form, components, form.shape(components))
            if form
            else components[""]
        )
    return stored


@pytest.mark.parametrize("kind", STORED)
def test_rows_are_those_of_the_whole_matrices(kind: str, tmp_path: Path) -> None:
    form, make = STORED[kind]
    generator = torch.Generator().manual_seed(0)
    matrices = [make(height, WIDTH, generator) for height in HEIGHTS]
    if "global" in matrices[0]:
        matrices[1]["global"] *= 2
    whole = torch.cat([form.dequantise(each) if form else each[""] for each in matrices])
    stored = store(tmp_path, form, matrices)
    assert all(map(has_rows, stored))
    for dtype in (torch.float32, torch.bfloat16):
        rows = StoredRows("table", stored, dtype)
        assert rows.shape == whole.shape
        assert rows.nbytes == sum(
            tensor.nbytes for each in matrices for role, tensor in each.items() if role != "size"
        )
        for _ in range(2):
            assert torch.equal(rows.read(ASKED.numpy()), whole[ASKED].to(dtype))
        assert (rows.num_read, rows.num_kept) == (len(ASKED), len(ASKED))
        assert rows.kept_nbytes == len(ASKED) * rows._kept.shape[1] > 0


@pytest.mark.parametrize("form", [Gptq(bits=4), Awq()])
def test_codes_that_run_down_the_rows_are_no_rows(form: Format, tmp_path: Path) -> None:
    make = MAKERS["gptq" if isinstance(form, Gptq) else "awq"]
    assert not has_rows(*store(tmp_path, form, [make(64, 64, torch.Generator())]))


def test_a_row_gives_way_to_another_of_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(20, 8)
    monkeypatch.setattr(row_table, "KEPT_NBYTES", 4 * 8 * 4)  # places for four rows
    monkeypatch.setattr(row_table, "_AT_ONCE", 4)
    rows = StoredRows("table", store(tmp_path, None, [{"": matrix}]), torch.float32)
    found = []
    for numbers in ([0, 1, 2, 3], [1, 3, 4, 8], [4, 5, 6], [0, 1, 2, 3, 7, 11, 15, 19], [3, 19]):
        assert torch.equal(rows.read(torch.tensor(numbers).numpy()), matrix[numbers])
        found.append((rows.num_read, rows.num_kept))
    # of 4 and 8, or 7 to 19, which came together, the first one stays
    assert found == [(4, 0), (6, 2), (8, 3), (15, 4), (17, 4)]
    assert rows.kept_nbytes == 4 * 8 * 4


def test_rows_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    matrix = torch.randn(20, 8)
    matrix[7, 3] = torch.nan
    rows = StoredRows("table", store(tmp_path, None, [{"": matrix}]), torch.float32)
    for numbers in ([-1, 2], [3, 20]):
        with pytest.raises(IndexError, match="table has 20 rows"):
            rows.read(torch.tensor(numbers).numpy())
    with pytest.raises(BadInput, match="table holds NaN or infinity"):
        rows.read(torch.tensor([6, 7]).numpy())
    assert torch.equal(rows.read(torch.tensor([6]).numpy()), matrix[[6]])
    halves = [{"": matrix}, {"": matrix.half()}]
    with pytest.raises(BadInput, match="table is stored in parts of several kinds"):
        StoredRows("table", store(tmp_path, None, halves), torch.float32)


@pytest.mark.parametrize("family", ["qwen4_exp", "gemma4", "gemma4_text"])
def test_models_have_their_logits_with_tables_in_files(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    folder = save(model, tmp_path, as_published=True)
    expected = reference(folder, model)
    opened = open_model(str(folder))
    (table,) = tables_of(opened.model)
    held = [name for name, _ in opened.model.named_parameters()]
    assert not any("ngram_embedding" in name or "embed_tokens_per" in name for name in held)
    before = table.num_read + table.num_kept
    with Session(opened, Settings(budget="30%")) as session:
        assert torch.equal(logits(opened.model), expected)
        told = session.receipt()["tables"]
    heads = 4 if family == "qwen4_exp" else 1
    assert IDS.numel() < told["rows_read"] + told["rows_kept"] - before <= (IDS.numel() + 2) * heads
    assert told == {
        "bytes": 2 * table.shape[0] * table.shape[1],
        "kept_bytes": table.kept_nbytes,
        "rows_read": table.num_read,
        "rows_kept": table.num_kept,
    }


WIDE = {"hidden_size": 64, "hidden_size_per_layer_input": 32, "intermediate_size": 64}


@pytest.mark.parametrize("method", ["fp8", "nvfp4"])
def test_tables_in_few_bits(method: str, tmp_path: Path) -> None:
    folder = save(tiny("gemma4_text", WIDE), tmp_path / "plain", as_published=True)

    def choose(name: str, tensor: torch.Tensor) -> Maker | None:
        return MAKERS[method] if "embed_tokens_per_layer" in name else None

    published = publish(folder, tmp_path / "published", method, choose=choose)
    expected = reference(folder, tiny("gemma4_text", WIDE))
    assert torch.equal(*offloaded(published, ("on-demand",)), expected)
    assert len(tables_of(open_model(str(published)).model)) == 1


def test_a_table_without_rows_of_its_own_is_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tensors, "has_rows", lambda tensor: False)
    model = tiny("gemma4_text")
    folder = save(model, tmp_path, as_published=True)
    expected = reference(folder, model)
    opened = open_model(str(folder))
    line = "model.embed_tokens_per_layer.weight is held in memory as a whole: its format"
    with Session(opened, Settings(budget="30%")) as session:
        assert torch.equal(logits(opened.model), expected)
        assert session.receipt()["tables"] == {}
        assert any(each.startswith(line) for each in session.receipt()["fallbacks"])


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = save(tiny("gemma4_text"), tmp_path, as_published=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens_per_layer.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=rf"{name} has shape \[95, 16\] where the config asks for"):
        open_model(str(folder))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=f"{name} is missing from the checkpoint"):
        open_model(str(folder))


ROWS = 1_250_000  # of each of four heads, 2 KiB a row in bfloat16
MEASURED = """
import json, sys
import torch
from runtime.model.files.row_table import tables_of
from runtime.model.gguf.shape import gguf_shape
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tools.bench.measuring import forget_peak, peak_nbytes

forget_peak()
before = peak_nbytes()
with Session(open_model(sys.argv[1]), Settings(budget="30%")) as session:
    past = None
    for ids in (torch.arange(5, 17)[None], *torch.tensor([[[7]], [[9]], [[7]]])):
        out = session.forward(ids, past=past)
        past = out.past_key_values
    (table,) = tables_of(session.opened.model)
    last = table.read(torch.tensor([table.shape[0] - 1]).numpy())
    print(json.dumps([peak_nbytes() - before, session.receipt()["tables"], last[0, -1].item()]))
"""


def sparse(folder: Path) -> Path:
    """A checkpoint whose table of n-grams is a hole in the file, but for its last number, 1."""
    save(tiny("qwen4_exp_text", {"ple_embed_dim": 4096}), folder, as_published=True)
    sizes = [_find_nth_prime_after(ROWS - 1, head) for head in (1, 2, 3, 4)]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ngram_vocab_size_base": ROWS}))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    offsets = [0, *itertools.accumulate(sizes[:-1])]
    of_heads = {"ngram_heads_vocab_sizes": sizes, "ngram_heads_offsets": offsets}
    tensors |= {
        name: torch.tensor(of_heads[name.rpartition(".")[2]])
        for name in tensors
        if name.endswith(tuple(of_heads))
    }
    shards = sorted(name for name in tensors if ".shard_" in name)
    save_file({name: each for name, each in tensors.items() if name not in shards}, path)
    file = parsed(path.read_bytes())
    rows = -(-sum(sizes) // 128) * 128 // len(shards)
    stop = len(file.data)
    for name in shards:
        start, stop = stop, stop + rows * 2048
        entry = {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [start, stop]}
        file.header[name] = entry
    with path.open("wb") as out:
        out.write(joined(file))
        out.seek(stop - len(file.data) - 2, os.SEEK_CUR)
        out.write(torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy())
    return folder


@needs_triton
def test_a_table_of_ten_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    """Peak of a process that opens a model and decodes, beyond what imports take."""
    (line,) = interpret(MEASURED, str(sparse(tmp_path)))
    grown, told, last = json.loads(line)
    assert told["bytes"] > 10e9 and told["rows_read"] > 20 and last == 1
    assert grown < 300 << 20


def test_a_table_of_a_gguf_file_is_counted_apart(tmp_path: Path) -> None:
    plain = gguf_shape(write("olmoe", tmp_path / "plain.gguf", every("Q8_0")))[1]

    def add(arrays: dict[str, np.ndarray]) -> None:
        arrays["per_layer_token_embd.weight"] = np.zeros((64, 256), np.float32)

    _, found = gguf_shape(write("olmoe", tmp_path / "with.gguf", every("Q8_0"), change=add))
    nbytes = 64 * 8 * 34
    assert found == replace(plain, stored_nbytes=plain.stored_nbytes + nbytes, tables_nbytes=nbytes)
