"""Models that are larger than a disk has room for: dense weights as usual, experts as a hole in the
file, and contents made where they are needed."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

from artifacts.shape import Shape
from runtime.model.layers import moe_layers
from runtime.model.layout import ExpertLayout, aligned
from runtime.model.open import MoeModel
from runtime.model.skeleton import build_skeleton
from runtime.tiers.ram import RamStore

# different experts in rotation; standard deviation of a weight
_KINDS = 8
_SPREAD = 0.02


def save(config, folder: Path, *, device: str, give_routing) -> None:
    """Write a checkpoint in bfloat16 whose experts are a hole, which reads as zeros and takes no
    room."""
    model = build_skeleton(config, torch.bfloat16)
    experts = {id(one) for layer in moe_layers(model) for one in layer.experts.parameters()}
    random = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            if id(one) not in experts:
                setattr(
                    module, name, nn.Parameter(_weights(one, random, device), requires_grad=False)
                )
    give_routing(model)
    _write(dict(model.named_parameters()), folder / "model.safetensors")
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def _weights(like: torch.Tensor, random: torch.Generator, device: str) -> torch.Tensor:
    if like.dim() == 1:  # of a norm
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    return torch.randn(like.shape, generator=random, device=device).mul_(_SPREAD).to(like.dtype)


def _write(parameters: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file, tensors on `meta` last and unwritten."""
    names = sorted(parameters, key=lambda name: parameters[name].is_meta)
    ends = list(accumulate(parameters[name].nbytes for name in names))
    spans = {}
    for name, end in zip(names, ends, strict=True):
        own = parameters[name]
        spans[name] = {
            "dtype": "BF16",
            "shape": list(own.shape),
            "data_offsets": [end - own.nbytes, end],
        }
    header = json.dumps(spans | {"__metadata__": {"format": "pt"}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            if not parameters[name].is_meta:
                file.write(parameters[name].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        file.truncate(8 + len(header) + ends[-1])


class RandomExperts:
    """A store of experts that are made, not read: a few different ones in rotation."""

    def __init__(self, layout: ExpertLayout, shape: Shape) -> None:
        self.layout = layout
        self.shape = shape
        random = torch.Generator().manual_seed(0)
        self._kinds = []
        for _ in range(_KINDS):
            kind = aligned(layout.nbytes)
            for part in layout.views(kind).values():
                part.copy_(torch.randn(part.shape, generator=random).mul_(_SPREAD))
            self._kinds.append(kind)

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        out[: self.layout.nbytes].copy_(self._kinds[(layer + expert) % _KINDS])

    def check_unchanged(self) -> None:
        """Return always: there is no file."""


def with_experts(opened: MoeModel, *, pin: bool) -> MoeModel:
    """The model with random experts in RAM."""
    return replace(
        opened, store=RamStore(RandomExperts(opened.store.layout, opened.shape), pin=pin)
    )
