"""GPTQ checkpoints: tensors as other readers expect them, read back; unreadable ones are refused
with the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from artifacts.errors import BadInput
from artifacts.quantisation.gptq_checkpoint import (
    WIDTHS,
    gptq_tensors,
    quantize_config,
)
from artifacts.quantisation.packing import Packed, pack
from tools.lab.gptq_reader import GptqCheckpoint

NAME = "model.layers.0.mlp.experts.0.up_proj"


def packed(bits: int, num_outputs: int = 64, num_inputs: int = 96, group_size: int = 32) -> Packed:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 2**bits, (num_inputs, num_outputs), np.uint8)
    zeros = random.integers(0, 2**bits, (num_outputs, num_inputs // group_size), np.uint8)
    scales = torch.rand(num_inputs // group_size, num_outputs).half()
    words = torch.from_numpy(pack(zeros, bits)).T.contiguous()
    return Packed(bits, group_size, num_inputs, torch.from_numpy(pack(codes, bits)), scales, words)


def written(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    save_file(
        {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    whole = quantize_config(4, 32, damp=0.01, dynamic={}, meta={}) | config
    (folder / "quantize_config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_module_comes_back(bits: int, tmp_path: Path) -> None:
    before = packed(bits)
    checkpoint = GptqCheckpoint.open(written(tmp_path, gptq_tensors(before), bits=bits))
    assert checkpoint.modules() == [NAME]
    after = checkpoint.read(NAME)
    assert (after.bits, after.group_size, after.num_inputs) == (bits, 32, 96)
    for name in ("qweight", "qzeros", "scales"):
        assert torch.equal(getattr(after, name), getattr(before, name))


def test_the_config_may_lie_in_the_models(tmp_path: Path) -> None:
    written(tmp_path, gptq_tensors(packed(4)))
    config = json.loads((tmp_path / "quantize_config.json").read_text())
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert GptqCheckpoint.open(tmp_path).read(NAME).bits == 4


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_first_layout_is_read_when_it_is_symmetric(bits: int, tmp_path: Path) -> None:
    middle = np.full((64, 3), 2 ** (bits - 1), np.uint8)
    first = gptq_tensors(packed(bits)) | {
        "qzeros": torch.from_numpy(pack(middle - 1, bits)).T.contiguous()
    }
    folder = written(tmp_path, first, bits=bits, checkpoint_format="gptq", sym=True)
    assert torch.equal(
        GptqCheckpoint.open(folder).read(NAME).qzeros, torch.from_numpy(pack(middle, bits)).T
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"checkpoint_format": "gptq", "format": "gptq"},
            "asymmetric: it stores zero-points minus one, and a zero-point",
        ),
        ({"checkpoint_format": "gptq_p"}, "gptq in the layout gptq_p"),
        ({"quant_method": "awq"}, "is awq"),
        ({"bits": 5}, "has 5 bits"),
    ],
)
def test_what_cannot_be_read_is_refused(config: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        GptqCheckpoint.open(written(tmp_path, gptq_tensors(packed(4)), **config))


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no GPTQ checkpoint"):
        GptqCheckpoint.open(tmp_path)
    whole = gptq_tensors(packed(4))
    for tensors, says in (
        ({**whole, "g_idx": whole["g_idx"].flip(0).contiguous()}, "another order"),
        ({**whole, "qweight": whole["qweight"][:-1].contiguous()}, "do not fit 4 bits"),
        ({name: whole[name] for name in ("qweight", "qzeros", "scales")}, "no .*g_idx"),
    ):
        with pytest.raises(BadInput, match=says):
            GptqCheckpoint.open(written(tmp_path, tensors)).read(NAME)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(BadInput, match="download it again"):
        GptqCheckpoint.open(tmp_path)


def test_what_no_reader_takes_is_not_written() -> None:
    with pytest.raises(
        BadInput, match="multiples of 32 inputs and outputs, .* 48 outputs and 96 inputs"
    ):
        gptq_tensors(packed(4, num_outputs=48))
    one = Packed(1, 32, 96, torch.zeros(3, 64, dtype=torch.int32), torch.ones(3, 64).half(), None)
    with pytest.raises(BadInput, match="2, 3, 4 or 8 bits, not 1"):
        gptq_tensors(one)
