"""The interface behind which a step's experts are computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn

from runtime.control.plan import Place
from runtime.model.open import MoeModel
from runtime.tiers.near import NearTier

if TYPE_CHECKING:
    from runtime.kernels.cpu.decoder.compiled_layers import WholeExperts


@dataclass(slots=True, eq=False)
class StepTokens:
    """The tokens of one layer step, and the experts that the plan gives them."""

    module: nn.Module  # the layer's experts
    hidden: torch.Tensor  # [T, H]
    experts: np.ndarray  # [T, K], -1 for none
    ids: torch.Tensor  # [T, K], as the router left them on the device
    router_weights: torch.Tensor  # [T, K], likewise
    host_weights: np.ndarray  # [rows, K] float32: the plan's, or the router's
    are_planned: bool  # whether the plan's weights replace the router's
    are_routed: bool  # whether experts and weights are the router's own
    rows: np.ndarray | None = None  # the rows that are tokens, beside padding; None: all

    def planned_weights(self) -> torch.Tensor:
        """Return the plan's weights [T, K], on the device and in the router's type."""
        planned = torch.from_numpy(np.ascontiguousarray(self.host_weights)).to(self.router_weights)
        if self.rows is None:
            return planned
        rows = torch.from_numpy(self.rows).to(planned.device)
        return torch.zeros_like(self.router_weights).index_copy_(0, rows, planned)


class Backend:
    """Computes the experts of a step and adds them up: `begin` it, `add` and `add_near` experts in
    any order, `finish` it.

    A backend that computes whole layers has in `whole`, by layer, what it notes of a layer whose
    experts, or the replicas in their place, never leave.
    """

    name: ClassVar[str]  # in receipts
    computes_layers: bool = False  # one token's, in one call, from what was noted of a layer
    needs_all: ClassVar[bool] = False  # to note a layer, all of its experts
    # one token's step needs nothing of the host: it can be captured, or decided on the device
    needs_no_host: ClassVar[bool] = False
    takes_splits: ClassVar[bool] = False  # also where the user did not ask for compiled code
    is_for_one_device: ClassVar[bool] = False

    @staticmethod
    def suits(opened: MoeModel, *, has_replicas: bool = False) -> bool:
        """Return whether the backend computes this model's experts, and the replicas beside them if
        there are any."""
        raise NotImplementedError

    @staticmethod
    def dequantised_layers(opened: MoeModel) -> tuple[int, ...]:
        """Return the layers whose experts no kernel multiplies as they are stored, so that one at a
        time is dequantised and computed by torch."""
        return ()

    @staticmethod
    def timed_experts(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return a function to be timed: it computes the experts of `contents`, uint8 on the
        model's device, all of them on one token."""
        raise NotImplementedError

    def begin(self, tokens: StepTokens) -> "Backend":
        """Begin a step, and return the backend that computes it."""
        raise NotImplementedError

    def add(self, places: Sequence[Place]) -> None:
        """Compute the experts in these slots, or on the replicas that stay beside them; all must be
        there."""
        raise NotImplementedError

    def add_near(self, places: Sequence[Place], near: NearTier, ready: Sequence[Place]) -> None:
        """Compute `places` in the near tier, and the `ready` experts as by `add`, before them or
        together with them."""
        raise NotImplementedError

    def finish(self) -> torch.Tensor:
        """Return the layer's output [T, H]."""
        raise NotImplementedError

    def forward(
        self,
        module: nn.Module,
        hidden: torch.Tensor,
        experts: Sequence[int],
        places: Sequence[Place],
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a whole step of one token [1, H] whose `experts`, none twice, are all there, with
        `weights` [1, K]: [1, H]."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop an unfinished step and everything known of the contents of slots."""
        raise NotImplementedError

    # Of backends that compute whole layers

    whole: dict[int, object]

    @property
    def all_whole(self) -> "WholeExperts | None":
        """The addresses of the experts of the layers that are noted, for a kernel of all layers;
        None where there is no such kernel."""
        return None

    def note_layer(self, layer: int, slots: Sequence[int]) -> None:
        """Note that the experts of a layer lie, whole, in `slots` [E], `NO_SLOT` for one that is
        absent."""
        raise NotImplementedError

    def forward_whole(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """Compute a whole step of one token [1, H] in a layer that is noted, ids and weights [1, K]
        as the router left them; None if an expert is absent."""
        raise NotImplementedError
