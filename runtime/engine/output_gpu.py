"""A step's experts on a GPU in a few kernels, wherever in the arena of slots they lie.

It gives what the model's own code gives up to the order of additions within a product, as
`runtime.engine.output_cpu` does on a CPU.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

from runtime.control.plan import Place
from runtime.engine import forms_gpu as cudaforms
from runtime.engine.forms_gpu import Form, Forms, FullPrecision
from runtime.kernels.batched import is_plain
from runtime.kernels.gpu.tiles import SortedPairs
from runtime.kernels.load import kernels
from runtime.model.arithmetic import Assigned, assign, gather
from runtime.model.layout import ExpertLayout
from runtime.model.open import MoeModel
from runtime.tiers.fast import Resident

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NONE = -1


class FusedCuda:
    """The output of a layer: `begin` a token, or `begin_many`; `add` what is there as often as it takes; `finish`.

    Many tokens are sorted by expert, and weights read once for a tile of them; one token reads them by itself. What is
    computed near, and replicas of few bits on many tokens, torch computes.
    """

    def __init__(self, opened: MoeModel, resident: Resident) -> None:
        self._resident, self._num_experts = resident, opened.shape.num_experts
        self._forms, self._device = Forms(resident), resident.slots.device
        self.whole: dict[int, torch.Tensor] = {}  # [E] where each expert begins, of layers that are wholly there

    @staticmethod
    def suits(opened: MoeModel) -> bool:
        """Whether there are kernels for such experts: gated by SiLU, without bias, each matrix by rows."""
        layout = opened.store.layout
        is_full = isinstance(layout, ExpertLayout) and layout.dtype in _DTYPES
        return is_full and is_plain(opened.layers[0].experts) and _runs_on(opened.model.device)

    def begin(self, module: nn.Module, hidden: torch.Tensor, experts: Sequence[int], weights: np.ndarray) -> None:
        """A token [1, H] that goes to `experts` [K], -1 for none, with `weights` [K] float32."""
        own = np.array([experts], np.int32)
        sent = self._to_device(np.stack((own, np.ascontiguousarray(weights, np.float32)[None].view(np.int32))))
        self._start(module, hidden, own, sent[0], sent[1].view(torch.float32))
        self._groups = None

    def begin_many(self, module: nn.Module, hidden: torch.Tensor, experts: np.ndarray, weights: torch.Tensor) -> None:
        """Tokens [T, H] that go to `experts` [T, K], -1 for none, with `weights` [T, K]."""
        self._groups = groups = SortedPairs(experts)
        sent = self._to_device(np.stack((experts.astype(np.int32).ravel(), groups.order)))
        self._start(module, hidden, experts, sent[0].view(experts.shape), weights)
        self._order = sent[1]
        self._block_tokens = kernels("gpu.gated_tiles").tile_tokens(experts.size, self._num_experts)

    def forward(
        self, hidden: torch.Tensor, experts: Sequence[int], places: Sequence[Place], weights: torch.Tensor
    ) -> torch.Tensor:
        """A token [1, H] whose experts are all there, with `weights` [1, K]: [1, H]."""
        own = np.array([experts], np.int32)
        self._start(None, hidden, own, self._to_device(own), weights)
        self._groups = None
        self.add(places)
        return self.finish()

    def know(self, layer: int, slots: Sequence[int]) -> None:
        """Every expert of a layer lies, whole, in one of `slots` [E]."""
        self.whole[layer] = self._forms.full.starts(slots)

    def settled(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A token [1, H] of a layer that is wholly there, ids and weights [1, K] as the router left them on the device:
        the host neither reads them nor waits."""
        y, ids = torch.empty(ids.numel(), hidden.shape[1], device=self._device), ids.contiguous()
        self._forms.full.multiply(hidden.contiguous(), ids, y, starts=self.whole[layer])
        return _combined(y, ids, weights, hidden)

    def assigned(self, expert: int) -> Assigned:
        """The tokens it serves."""
        if not self._assigned:
            self._assigned = assign(self._experts, self._device)
        return self._assigned[expert]

    def add(self, places: Sequence[Place]) -> None:
        """Compute what lies in slots, or stays beside them, all there."""
        by_form: dict[Form, list[Place]] = {}
        for place in places:
            by_form.setdefault(self._forms.of(place), []).append(place)
        for form, own in by_form.items():
            numbers = {place.key % self._num_experts: form.number(place) for place in own}
            if not self._groups:
                self._multiply(form, numbers)
            elif isinstance(form, FullPrecision):
                self._multiply_groups(form, numbers)
            else:
                self._add_by_torch(own)

    def computes(self, place: Place) -> bool:
        """What lies outside the fast tier torch computes."""
        return False

    def add_output(self, expert: int, y: torch.Tensor) -> None:
        """An expert's output on its tokens [t, H], or that of a segment, computed elsewhere."""
        tokens, ranks = self.assigned(expert)
        by_token, own = self._y.view(*self._experts.shape, -1), (0 if tokens is None else tokens, ranks)
        y = y.to(by_token.dtype)
        by_token[own] = by_token[own] + y if self._forms.are_cut else y

    def finish(self) -> torch.Tensor:
        """The layer's output [T, H]; what led to it is let go, or a prompt's would stay for all tokens after it."""
        output = _combined(self._y, self._keys, self._weights, self._hidden)
        del self._y, self._keys, self._weights, self._hidden
        self._assigned, self._groups = {}, None
        return output

    def _start(
        self,
        module: nn.Module | None,
        hidden: torch.Tensor,
        experts: np.ndarray,
        keys: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """`keys`: the experts on the device."""
        self._module, self._hidden, self._experts = module, hidden.contiguous(), experts
        self._keys, self._weights = keys, weights
        self._assigned: dict[int, Assigned] = {}
        is_cut = self._forms.are_cut
        # Segments add up to an output that is rounded once; what many tokens leave here is as large as their experts.
        dtype = torch.float32 if is_cut or len(hidden) == 1 else hidden.dtype
        self._y = (torch.zeros if is_cut else torch.empty)(
            experts.size, hidden.shape[1], dtype=dtype, device=self._device
        )

    def _multiply(self, form: Form, numbers: dict[int, int]) -> None:
        own = np.array([[numbers.get(expert, _NONE) for expert in self._experts[0].tolist()]], np.int32)
        form.multiply(self._hidden, self._to_device(own), self._y)

    def _multiply_groups(self, form: FullPrecision, numbers: dict[int, int]) -> None:
        tiles = self._to_device(self._groups.tiles(numbers, self._block_tokens))
        sizes = {"top_k": self._experts.shape[1], "block_tokens": self._block_tokens}
        form.multiply_tiles(self._hidden, self._order, tiles, self._y, **sizes)

    def _add_by_torch(self, places: Sequence[Place]) -> None:
        for place in places:
            expert = place.key % self._num_experts
            x = gather(self._hidden, self.assigned(expert))
            self.add_output(expert, self._resident.forward(self._module, place, x))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        """The driver takes so small an array at once: the host waits for nothing that is queued."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def alone(opened: MoeModel, contents: Sequence[torch.Tensor]) -> Callable[[int], None]:
    """Computes expert number i of `contents`, uint8 on the GPU, on one token and forgets it: to be timed."""
    layout, device = opened.store.layout, contents[0].device
    x = torch.zeros(1, opened.layers[0].shapes["down_proj"][0], dtype=layout.dtype, device=device)
    zero, y = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.empty(1, x.shape[1], device=device)
    forms = [cudaforms.alone(layout, content) for content in contents]
    return lambda turn: forms[turn % len(forms)].multiply(x, zero, y)


def _combined(y: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[T, H] of `like`'s type."""
    out = torch.empty_like(like)
    kernels("gpu.gated").combine(y, keys, weights.contiguous(), out)
    return out


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
