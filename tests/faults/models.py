"""Checkpoints to damage, and the line that refuses them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts.errors import BadInput
from runtime.model.open import open_model

GATE = "model.layers.1.mlp.gate.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"

Copy = Callable[..., Path]


def refusal(folder: Path | str) -> str:
    """The one line of the refusal to open `folder`."""
    with pytest.raises(BadInput) as caught:
        open_model(str(folder))
    line = str(caught.value)
    assert line.count("\n") == 0, line
    assert len(line) < 400, line
    return line


def with_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )
    return folder
