"""Some experts are never selected, as if they were pruned from the checkpoint (REAP: Lasby et al.,
2025; lossy)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from artifacts.errors import BadUsage
from artifacts.shape import Shape
from runtime.policies.base import Artefacts, Simple, Step
from runtime.policies.routing.cache_aware import rows, strongest


@dataclass
class Pruned(Simple):
    """The strongest of the experts that are left serve a token, weighted by their probabilities, so
    that the token keeps its sum of weights.

    `experts`: the pruned keys as a hexadecimal number, whose bit `l * E + e` is expert e of layer
    l, as `moectl price` writes it. Raises BadUsage.
    """

    reroutes: ClassVar[bool] = True
    sees_probabilities: ClassVar[bool] = True

    experts: str = "0"

    def __post_init__(self) -> None:
        try:
            self._bits = int(self.experts, 16)
        except ValueError:
            raise BadUsage(
                f"pruned takes experts as a hexadecimal number, not {self.experts!r}"
            ) from None

    @classmethod
    def of(cls, mask: np.ndarray) -> "Pruned":
        """Return the policy that prunes the keys of `mask` [L, E] bool."""
        bits = np.packbits(mask.ravel(), bitorder="little").tobytes()
        return cls(f"{int.from_bytes(bits, 'little'):x}")

    def prepare(self, shape: Shape, artefacts: Artefacts) -> None:
        if self._bits < 0 or self._bits >> shape.num_keys:
            raise BadUsage(f"pruned names experts beyond the model's {shape.num_keys}")
        taken = np.frombuffer(self._bits.to_bytes(shape.num_keys // 8 + 1, "little"), np.uint8)
        bits = np.unpackbits(taken, bitorder="little")[: shape.num_keys]
        self._pruned = bits.reshape(shape.num_layers, -1).astype(bool)
        left = shape.num_experts - self._pruned.sum(axis=1)
        if left.min() < shape.top_k:
            raise BadUsage(
                f"pruned leaves {left.min()} experts of a layer, and a token takes {shape.top_k}"
            )

    def route(self, step: Step, resident: np.ndarray) -> Step:
        pruned = self._pruned[step.layer]
        changed = pruned[step.selected].any(axis=1, keepdims=True)
        if not changed.any():
            return step
        assert step.probabilities is not None, "pruned runs without router probabilities"
        selected = strongest(np.where(pruned, -1.0, step.probabilities), step)
        chances = step.probabilities[rows(step), selected]
        total = step.weights.sum(axis=1, keepdims=True)
        scaled = (chances * (total / chances.sum(axis=1, keepdims=True))).astype(np.float32)
        return replace(
            step,
            selected=np.where(changed, selected, step.selected),
            weights=np.where(changed, scaled, step.weights),
        )
