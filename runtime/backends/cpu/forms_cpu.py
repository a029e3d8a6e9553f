"""CPU backends of experts in RAM, with compiled code for a few tokens: at full precision, cut in
segments, and as packed replicas. Experts as published and in trellis codes have modules of their
own."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from operator import attrgetter

import numpy as np
import torch
from torch import nn

from artifacts.quantisation.packing import PARTS, Packed
from artifacts.quantisation.widths import Width
from artifacts.shape import FULL_BITS
from runtime.backends.cpu.form import CpuForm, LayerForm, TokenOperands
from runtime.backends.cpu.forms_published import CpuMixed, CpuPublished, has_published_form
from runtime.backends.cpu.forms_trellis import CpuTrellis
from runtime.control.plan import NO_SLOT, Place
from runtime.kernels.batched import is_plain
from runtime.kernels.cpu.decoder.compiled_norm import like_of
from runtime.kernels.cpu.dense import MOST_TOKENS
from runtime.kernels.cpu.row_shares import RowShares, plain_rows
from runtime.kernels.cpu.threads import KernelThreads, divided
from runtime.kernels.gates import RULES, SILU, Gate, gate_of
from runtime.kernels.load import AS_NUMPY, kernels
from runtime.model.arithmetic import DOWN, GATE_UP
from runtime.model.layout import ExpertLayout, Layout, Part
from runtime.model.open import MoeModel
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.replica_layouts import ReplicaLayout
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slow import SlowTier
from runtime.tiers.slow_split import SegmentTier

_bits = attrgetter("bits")
_MOST_IN_TILES = {
    torch.bfloat16: 16,
    torch.float16: 64,
}  # tokens of a whole expert; docs/lab/performance.md has the times
_MOST_FLOATS = 3  # the same in float32


class TokenKernels:
    """Multiplies one token or a few by experts in RAM, which `threads` share. An expert is found by
    its address."""

    def __init__(self, opened: MoeModel, resident: ResidentExperts, threads: KernelThreads) -> None:
        self._shadows = resident.shadows
        self._forms = forms_of(resident.slow, resident.shadows, opened)
        self._threads = threads
        self._sizes = _sizes_of(resident.slow, resident.shadows)
        self._starts = [slot.data_ptr() for slot in resident.slots]
        self._like = like_of(opened.dtype)
        self._taken = torch.empty(MOST_TOKENS, opened.layers[0].hidden_size)
        self._x = self._taken.numpy()
        self._tokens: list[int] | None = None

    @cached_property
    def packed_bits(self) -> frozenset[Width]:
        """The numbers of bits at which experts are replicas, packed or in trellis codes."""
        return frozenset(bits for bits, form in self._forms.items() if form.is_replica)

    def starts_of(self, slots: Sequence[int]) -> list[int]:
        """Addresses of the experts in these slots, 0 for `NO_SLOT`."""
        return [0 if slot == NO_SLOT else self._starts[slot] for slot in slots]

    def whole_layer(
        self, starts: np.ndarray, replicas: tuple, top_k: int
    ) -> Callable[[int, int, int, int, bool, int], bool]:
        """Return the kernel of a layer whose experts begin at `starts` [E], 0 for an expert that is
        absent or has only its replica. The kernel takes the number of tokens, the addresses of x,
        ids and weights, whether the weights are float32, and the address of the output. It returns
        whether all experts are there."""
        form = self.whole_form
        like = self._like
        sizes = form.hidden_size, form.num_neurons, top_k
        run = partial(
            kernels("cpu.whole_layer").compute_layer, starts, form.matrices, sizes, replicas
        )
        return lambda *operands: run(*operands, like)

    @property
    def whole_form(self) -> LayerForm | None:
        """Layout in which kernels take the experts of a whole layer: experts at full precision, or
        the resident replicas where there are no slots. None if no kernel does."""
        if self._shadows and not self._starts:
            forms = [self._forms[bits] for bits in self._shadows.layouts]
            return (
                forms[0].of_absent()
                if all(isinstance(form, CpuTrellis) for form in forms)
                else None
            )
        return self._forms[FULL_BITS].whole() if FULL_BITS in self._forms else None

    def whole_replicas(self, num_layers: int, num_experts: int) -> tuple:
        """Return the resident replicas by layer, as kernels take them, where there are no slots;
        otherwise no replicas."""
        if not self._shadows or self._starts:
            return kernels("cpu.whole_layer").no_replicas(num_layers)
        return self._forms[self._shadows.widths[0]].of_layers(
            self._shadows, num_layers, num_experts
        )

    def computes_layers(self, top_k: int) -> bool:
        """Return whether there is a `whole_layer` kernel for a token's `top_k` experts, and threads
        would not share them."""
        form = self.whole_form
        return form is not None and self._threads.num_shares(top_k * form.nbytes) == 1

    def take(self, hidden: torch.Tensor, tokens: list[int] | None = None) -> None:
        """Multiply the tokens [T, H] from here on: row i of a result is of token tokens[i], or all
        rows are of the only one."""
        self._taken[: len(hidden)].copy_(hidden)
        self._tokens = tokens

    def _tokens_of(self, rows: Sequence[int]) -> list[int] | None:
        """Return the token of each of these rows, None if there is only one."""
        return None if self._tokens is None else [self._tokens[row] for row in rows]

    def starts(self, places: Sequence[Place]) -> list[int]:
        """Addresses of the experts in slots, or of the replicas that stay beside them."""
        return [
            self._shadows.address(place.key) if place.slot == NO_SLOT else self._starts[place.slot]
            for place in places
        ]

    def add(
        self, places: Sequence[Place], starts: Sequence[int], rows: Sequence[int], y: np.ndarray
    ) -> None:
        """Add to y[rows[i]], y [K, H] float32, the output of places[i] at starts[i]."""
        if self._threads.count == 1 or self._threads.num_row_shares(sum(self._sizes(places))) == 1:
            self._add(places, starts, rows, y)
            return
        others = []
        for form in dict.fromkeys(self._forms[place.bits] for place in places):
            own = [i for i, place in enumerate(places) if self._forms[place.bits] is form]
            num_shares = self._threads.num_row_shares(sum(self._sizes([places[i] for i in own])))
            if num_shares > 1 and form.rows and form.rows.are_divisible:
                own_starts = [starts[i] for i in own]
                own_rows = [rows[i] for i in own]
                operands = own_starts, own_rows, self._x, y, self._tokens_of(own_rows)
                form.rows.multiply_on(self._threads, num_shares, *operands)
            else:
                others += own
        if others:
            self._add_experts(
                [places[i] for i in others],
                [starts[i] for i in others],
                [rows[i] for i in others],
                y,
            )

    def _add_experts(
        self, places: Sequence[Place], starts: Sequence[int], rows: Sequence[int], y: np.ndarray
    ) -> None:
        """Do the same as `add`; each thread takes whole experts."""
        shares = self._shares(places, rows) if len(places) > 1 else ()
        if len(shares) > 1:
            self._threads.run(
                [partial(self._add_some, share, places, starts, rows, y) for share in shares]
            )
        else:
            self._add(places, starts, rows, y)

    def _shares(self, places: Sequence[Place], rows: Sequence[int]) -> list[list[int]]:
        """Return the indices of places by thread. Places of one row, such as the segments of one
        expert, stay together and in their order, so that the order of their sum does not change."""
        by_row: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_row.setdefault(row, []).append(i)
        pieces = list(by_row.values())
        sizes = self._sizes(places)
        nbytes = [sum(sizes[i] for i in piece) for piece in pieces]
        shares = divided(nbytes, self._threads.num_shares(sum(nbytes)))
        return [[i for piece in share for i in pieces[piece]] for share in shares]

    def _add(
        self, places: Sequence[Place], starts: Sequence[int], rows: Sequence[int], y: np.ndarray
    ) -> None:
        """Do the same as `add` on this thread, with one call for all places of one form."""
        forms = dict.fromkeys(map(self._forms.__getitem__, map(_bits, places)))
        if len(forms) == 1:
            form = next(iter(forms))
            if form.rows:
                form.rows.multiply(starts, rows, self._x, y, self._tokens_of(rows))
                return
            tokens = np.array(self._tokens_of(rows) or [0] * len(rows))
            for token in np.unique(tokens).tolist():
                own = np.flatnonzero(tokens == token).tolist()
                operands = TokenOperands(self._x[token], np.array(rows)[own], y, self._like)
                form.multiply([places[i] for i in own], [starts[i] for i in own], operands)
            return
        for form in forms:
            self._add_some(
                [i for i, place in enumerate(places) if self._forms[place.bits] is form],
                places,
                starts,
                rows,
                y,
            )

    def _add_some(
        self,
        chosen: Iterable[int],
        places: Sequence[Place],
        starts: Sequence[int],
        rows: Sequence[int],
        y: np.ndarray,
    ) -> None:
        """Do the same as `_add` for the places with these indices."""
        self._add(
            [places[i] for i in chosen], [starts[i] for i in chosen], [rows[i] for i in chosen], y
        )

    def outputs(
        self, hidden: torch.Tensor, places: Sequence[Place], starts: Sequence[int]
    ) -> torch.Tensor:
        """The output of each of `places`, at its address, for a token [1, H]: [n, 1, H]."""
        y = np.zeros((len(places), hidden.shape[1]), np.float32)
        self.take(hidden)
        self.add(places, starts, range(len(places)), y)
        return torch.from_numpy(y).to(hidden.dtype)[:, None]

    def takes(self, place: Place, num_tokens: int) -> bool:
        """Return whether `forward` computes an expert on `num_tokens` tokens faster than torch."""
        return num_tokens <= self._forms[place.bits].most_tokens

    def forward(self, place: Place, start: int, x: torch.Tensor) -> torch.Tensor:
        """Compute the expert at this address on its tokens, x [t, H] -> [t, H]."""
        return self._forms[place.bits].forward(place, start, x, self._like)


def forms_of(
    slow: SlowTier | SegmentTier, shadows: Shadows | None, opened: MoeModel
) -> dict[int, CpuForm]:
    """Return the backend for each number of bits, for experts that come from the slow tier or stay
    in the fast one."""
    module = opened.layers[0].experts
    if slow.is_split:
        return dict.fromkeys(slow.stores, CpuSegments(slow, gate_of(module)))
    layouts = _layouts(slow, shadows)
    coded = {bits: layout for bits, layout in layouts.items() if layout.codes == "trellis"}
    one = CpuTrellis(coded, opened.dtype) if coded else None
    return {
        bits: one if bits in coded else form_of(layout, opened.dtype, module, opened.activations)
        for bits, layout in layouts.items()
    }


def _sizes_of(
    slow: SlowTier | SegmentTier, shadows: Shadows | None
) -> Callable[[Sequence[Place]], list[int]]:
    """Return the function that gives the size in bytes of each of some experts that come from the
    slow tier or stay in the fast one."""
    if slow.is_split:
        return lambda places: list(map(slow.num_bytes, places))
    nbytes = {bits: layout.nbytes for bits, layout in _layouts(slow, shadows).items()}
    return lambda places: list(map(nbytes.__getitem__, map(_bits, places)))


def _layouts(slow: SlowTier, shadows: Shadows | None) -> dict[int, ExpertLayout | ReplicaLayout]:
    return {bits: store.layout for bits, store in slow.stores.items()} | (
        shadows.layouts if shadows else {}
    )


def has_form(module: nn.Module, layout: Layout, *, has_replicas: bool) -> bool:
    """Return whether there is compiled code for whole experts of this module and layout, and for
    their replicas if they have any. The code for replicas supports only SiLU's gate without
    bias, and at full precision rows and no biases are supported."""
    if is_plain(module):
        return layout.codes in ("plain", "packed", "trellis") or has_published_form(layout)
    gate = gate_of(module)
    if gate is None or has_replicas or module.is_transposed != gate.take_turns:
        return False
    if layout.codes == "plain":
        return not (module.is_transposed or module.has_bias)
    return has_published_form(layout)


def form_of(
    layout: ExpertLayout | ReplicaLayout,
    dtype: torch.dtype,
    module: nn.Module | None = None,
    activations: int | None = None,
) -> CpuForm:
    """Return the backend of experts with this layout, for a model of this dtype. `module` has their
    gate and dequantises those without kernels; None: they are gated by SiLU and have kernels.
    Blocks of 32 are multiplied by tokens of `activations` bits if these are given."""
    return _FORMS[layout.codes](layout, dtype, module, activations)


class CpuWhole(CpuForm):
    """Backend of experts as the module has them."""

    def __init__(self, layout: ExpertLayout, gate: Gate = SILU) -> None:
        inner, down = layout.parts
        self._gate = gate
        self._num_inner = inner.shape[0]
        self._offsets = (inner.offset, down.offset)
        self._num_neurons = down.shape[1]
        self._dtype = layout.dtype
        self._shape = down.shape
        self._nbytes = layout.nbytes

    @cached_property
    def _has_tiles(self) -> bool:
        """True if there is a kernel for several tokens. Read it only where experts are fused, as it
        imports numba."""
        if (
            self._gate != SILU
            or self._dtype is torch.float32
            or any(size % kernels("cpu.published.pairs").STEP for size in self._shape)
        ):
            return False
        return (
            kernels("cpu.lanes").HAS_PAIRS
            if self._dtype is torch.bfloat16
            else kernels("cpu.lanes").HAS_WIDE_HALVES
        )

    @property
    def most_tokens(self) -> int:
        if self._has_tiles:
            return _MOST_IN_TILES[self._dtype]
        return _MOST_FLOATS if self._dtype is torch.float32 else 1

    @cached_property
    def rows(self) -> RowShares:
        itemsize = self._dtype.itemsize
        hidden, num_neurons = self._shape
        inner, down = self._offsets
        return RowShares(
            [plain_rows(self._dtype, inner, self._num_inner, hidden * itemsize)],
            [plain_rows(self._dtype, down, hidden, num_neurons * itemsize)],
            self._dtype,
            gate=self._gate,
        )

    def whole(self) -> LayerForm | None:
        if self._gate != SILU:
            return None
        plain = kernels("cpu.linear").PLAIN
        inner, down = self._offsets
        return LayerForm(
            *self._shape, ((plain, inner), (plain, inner), (plain, down)), self._nbytes
        )

    def forward(self, place: Place, start: int, x: torch.Tensor, like: np.ndarray) -> torch.Tensor:
        if not self._has_tiles:
            return super().forward(place, start, x, like)
        out = torch.empty_like(x)
        inner, down = self._offsets
        own = [each.view(AS_NUMPY[x.dtype]).numpy() for each in (x, out)]
        kernels("cpu.several_tokens").compute_whole(
            start + inner, start + down, self._num_neurons, *own
        )
        return out


class CpuSegments(CpuForm):
    """Backend of segments of experts; a top segment lies behind its head."""

    def __init__(self, slow: SegmentTier, gate: Gate) -> None:
        itemsize = slow.layout.dtype.itemsize
        layout = slow.layout
        nbytes = slow.segments.nbytes
        heads = [
            0 if slow.segments.is_bottom(key) else layout.head * itemsize
            for key in range(len(nbytes))
        ]
        self._gate = RULES.index(gate.rule), gate.has_up, gate.constants
        self._heads = heads
        self._neurons = [
            (size - head) // (layout.width * itemsize)
            for size, head in zip(nbytes, heads, strict=True)
        ]

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        addresses = np.array(
            [start + self._heads[place.key] for place, start in zip(places, starts, strict=True)]
        )
        neurons = np.array([self._neurons[place.key] for place in places])
        kernels("cpu.gated").add_segments(addresses, neurons, *self._gate, *operands)


class CpuPacked(CpuForm):
    """Backend of packed replicas of one width."""

    is_replica = True

    def __init__(self, layout: ReplicaLayout, dtype: torch.dtype) -> None:
        packed = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
        inner = packed[GATE_UP]
        down = packed[DOWN]
        self._offsets = np.array([_offsets(layout.of(name)) for name in (GATE_UP, DOWN)])
        self._sizes = np.array([_num_groups(inner), _num_groups(down), down.num_inputs])
        adder = kernels("cpu.replicas.gated_packed").packed_adder
        self._add = adder(layout.bits, is_narrow=dtype is torch.bfloat16)

    def multiply(self, places: Sequence[Place], starts: list[int], operands: TokenOperands) -> None:
        self._add(np.array(starts)[:, None, None] + self._offsets, self._sizes, *operands)


def _offsets(parts: dict[str, Part]) -> list[int]:
    """Return the offsets of words, scales and zero-points. Without zero-points, the offset of the
    words is repeated in their place."""
    words, zeros, scales = (parts[role].offset if role in parts else None for role in PARTS)
    return [words, scales, words if zeros is None else zeros]


def _num_groups(packed: Packed) -> int:
    return len(packed.scales)


def _gate_of(module: nn.Module | None) -> Gate:
    return SILU if module is None else gate_of(module)


_FORMS: dict[str, Callable[..., CpuForm]] = {
    "plain": lambda layout, _, module, __: CpuWhole(layout, _gate_of(module)),
    "published": lambda layout, dtype, module, activations: CpuPublished(
        layout, dtype, _gate_of(module), activations
    ),
    "mixed": lambda layout, dtype, module, activations: CpuMixed(
        layout, dtype, _gate_of(module), module, activations
    ),
    "packed": lambda layout, dtype, *_: CpuPacked(layout, dtype),
    "trellis": lambda layout, dtype, *_: CpuTrellis({layout.bits: layout}, dtype),
}  # by the codes of a layout
