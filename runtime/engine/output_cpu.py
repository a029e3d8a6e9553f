"""One token's experts on a CPU in compiled code: one reading of the weights where they lie, one call for all of them.

It gives what the model's own code gives up to the order of additions within a product: in float32 some 1e-7, in
bfloat16, rounded wherever the module rounds, hardly ever another bit. docs/performance.md has figures.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from runtime.control.plan import NO_SLOT, Place
from runtime.engine.forms_cpu import PackedExperts, Token, form_of, forms_of
from runtime.kernels.batched import is_plain
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.model.open import MoeModel
from runtime.tiers.fast import Resident


class OneToken:
    """The experts of one token, by where they lie in memory."""

    def __init__(self, opened: MoeModel, resident: Resident) -> None:
        self._shadows, self._forms = resident.shadows, forms_of(resident.slow, resident.shadows, opened.dtype)
        self._starts = [slot.data_ptr() for slot in resident.slots]
        self._like = torch.empty(0, dtype=AS_NUMPY[opened.dtype]).numpy()
        self._token = torch.empty(opened.config.hidden_size)
        self._x = self._token.numpy()

    def is_packed(self, bits: int) -> bool:
        """Whether experts of so many bits are packed."""
        return isinstance(self._forms[bits], PackedExperts)

    def take(self, hidden: torch.Tensor) -> None:
        """The token [1, H] that is multiplied from here on."""
        self._token.copy_(hidden[0])

    def starts(self, places: Sequence[Place]) -> list[int]:
        """Addresses of what lies in slots, or stays beside them."""
        return [
            self._shadows.address(place.key) if place.slot == NO_SLOT else self._starts[place.slot] for place in places
        ]

    def add(self, places: Sequence[Place], starts: Sequence[int], rows: Sequence[int], y: np.ndarray) -> None:
        """y[rows[i]] [K, H] float32 += what lies for places[i] at starts[i]; those of one width in one call."""
        widths = {place.bits for place in places}
        if len(widths) == 1:
            self._forms[widths.pop()].multiply(places, starts, Token(self._x, np.array(rows), y, self._like))
            return
        for bits in widths:
            own = [i for i, place in enumerate(places) if place.bits == bits]
            token = Token(self._x, np.array([rows[i] for i in own]), y, self._like)
            self._forms[bits].multiply([places[i] for i in own], [starts[i] for i in own], token)

    def outputs(self, hidden: torch.Tensor, places: Sequence[Place], starts: Sequence[int]) -> torch.Tensor:
        """What each of `places`, at its start, makes of a token [1, H]: [n, 1, H]."""
        y = np.zeros((len(places), hidden.shape[1]), np.float32)
        self.take(hidden)
        self.add(places, starts, range(len(places)), y)
        return torch.from_numpy(y).to(hidden.dtype)[:, None]


class Fused:
    """The output of a layer on one token: `begin`, `add` what is there as often as it takes, `finish`."""

    def __init__(self, opened: MoeModel, resident: Resident) -> None:
        self._kernels, self._num_experts = OneToken(opened, resident), opened.shape.num_experts
        self._as_numpy = AS_NUMPY[opened.dtype]
        self._y = np.zeros((opened.shape.top_k, opened.config.hidden_size), np.float32)

    @staticmethod
    def suits(opened: MoeModel) -> bool:
        """Whether the experts are of the kind that is compiled: gated by SiLU, without bias, each matrix by rows."""
        is_kind = is_plain(opened.layers[0].experts) and opened.dtype in AS_NUMPY
        return is_kind and opened.model.device.type == "cpu"

    def begin(self, module: nn.Module, hidden: torch.Tensor, experts: Sequence[int], weights: np.ndarray) -> None:
        """A token [1, H] that goes to `experts`, -1 left out, with `weights` [K] float32."""
        ranks = sorted([(expert, rank) for rank, expert in enumerate(experts) if expert >= 0])
        self._rows = {expert: row for row, (expert, _) in enumerate(ranks)}
        self._start(hidden, weights[[rank for _, rank in ranks]])

    def forward(
        self, hidden: torch.Tensor, experts: Sequence[int], places: Sequence[Place], weights: torch.Tensor
    ) -> torch.Tensor:
        """A token [1, H] whose experts are all there, with `weights` [1, K]: [1, H]."""
        order = sorted(range(len(experts)), key=experts.__getitem__)
        self._start(hidden, weights.float().numpy()[0, order])
        own = [places[rank] for rank in order]
        self._kernels.add(own, self._kernels.starts(own), range(len(own)), self._y)
        return self.finish()

    def add(self, places: Sequence[Place]) -> None:
        """Compute what lies in slots, or stays beside them, all there."""
        self._add(places, self._kernels.starts(places))

    def computes(self, place: Place) -> bool:
        """Whether it computes such an expert itself, by `add_elsewhere`."""
        return True

    def add_elsewhere(self, place: Place, content: torch.Tensor) -> None:
        """Compute what lies outside the fast tier: `content`, uint8 on the CPU."""
        self._add([place], [content.data_ptr()])

    def finish(self) -> torch.Tensor:
        """The layer's output [1, H]."""
        out = torch.empty_like(self._hidden)
        kernels("cpu.gated").combine(self._y, self._weights, len(self._weights), out.view(self._as_numpy).numpy()[0])
        return out

    def _start(self, hidden: torch.Tensor, weights: np.ndarray) -> None:
        """`weights` by expert, ascending, as the module adds them up."""
        self._hidden, self._weights = hidden, weights
        self._kernels.take(hidden)
        self._y[: len(weights)] = 0

    def _add(self, places: Sequence[Place], starts: list[int]) -> None:
        self._kernels.add(places, starts, [self._rows[place.key % self._num_experts] for place in places], self._y)


def alone(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """Computes expert number i of `contents`, uint8 on the CPU, on one token and forgets it: to be timed."""
    form, hidden = form_of(opened.store.layout, opened.dtype), opened.layers[0].shapes["down_proj"][0]
    like = torch.empty(0, dtype=AS_NUMPY[opened.dtype]).numpy()
    token = Token(np.zeros(hidden, np.float32), np.zeros(1, np.int64), np.zeros((1, hidden), np.float32), like)
    starts = [content.data_ptr() for content in contents]
    return lambda turn: form.multiply((), [starts[turn % len(starts)]], token)
