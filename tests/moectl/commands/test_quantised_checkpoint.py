"""Every command that opens a model refuses a quantised checkpoint that is not whole, in one line and with nothing
written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moectl.cli import main
from tests.helpers import families
from tests.helpers.published import publish

WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def scaleless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 that is said of the text model only, with its scales removed."""
    folder = tmp_path_factory.mktemp("fp8")
    plain = families.save("qwen3_moe", "hub", folder / "plain", torch.bfloat16, fields=WIDE)
    out = publish(plain, folder / "published", "fp8")
    tensors = load_file(out / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    save_file(rest, out / "model.safetensors", metadata={"format": "pt"})
    path = out / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": {"quantization_config": config.pop("quantization_config")}}))
    return out


@pytest.mark.parametrize(
    "command", [("run", "--prompt", "a"), ("profile", "--data", "builtin:held-out"), ("quantize",)]
)
def test_weights_without_scales(
    scaleless: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert main([name, str(scaleless), *options]) == 3
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert ".weight is float8_e4m3fn without scales, quantised by fp8: download the checkpoint again" in said.err
    assert list(tmp_path.iterdir()) == []
