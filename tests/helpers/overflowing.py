"""A checkpoint of finite weights whose products overflow."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def overflowing(source: Path, folder: Path, *, layer: int = 1) -> Path:
    """Copy a checkpoint of a single file in the hub's layout to `folder`, with the experts of a
    layer too large."""
    shutil.copytree(source, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if f".layers.{layer}.mlp.experts." in name and "down_proj" not in name:
            tensors[name] *= 1e30
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
