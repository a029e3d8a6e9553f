"""Triton kernels for the parts of a decoder beside experts: norms and routers of any tokens, and
attention and blocks of a few tokens whose keys and values lie at fixed addresses, as CUDA graphs
need it. Modules are replaced only where the kernels agree with them."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    StaticLayer,
)

from runtime.kernels.decoder.attention import (
    Angles,
    BlockParts,
    TokenAttention,
    TokenBlock,
    compiled_attentions,
    compiled_blocks,
    told,
)
from runtime.kernels.decoder.attention_parts import Heads, Rotation
from runtime.kernels.decoder.forwards import Forwards
from runtime.kernels.decoder.norms import BOUNDS, Compiled, Norm, recognise_norm
from runtime.kernels.decoder.routers import RouterOutput, RouterTrial, try_router
from runtime.kernels.gpu.repeated import Repeated, blocks, width
from runtime.kernels.gpu.total import MOST_TOKENS
from runtime.kernels.load import kernels
from runtime.model.open import MoeModel

_NUMBERS = 64  # of heads in a program, unless a head has more
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonDecoder:
    """Replacement of `forward` in the modules that kernels compute, from `install` to
    `uninstall`."""

    def __init__(self, opened: MoeModel) -> None:
        device = opened.model.device

        def takes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
            return tensor.device == device and (dtype or tensor.dtype) in _DTYPES

        triton = Compiled(takes, _normalise)
        norms = {
            module: recognise_norm(module, opened.dtype, triton)
            for module in opened.model.modules()
        }
        self._norms = {
            module: _TritonNorm(module, norm, opened.dtype)
            for module, norm in norms.items()
            if norm
        }
        make = partial(TritonAttention, shared=_Shares(device))
        self._attentions = compiled_attentions(opened, triton, make, _fixed)
        self._blocks = compiled_blocks(opened, self._attentions, norms, _TritonBlock, _fixed)
        routers = {layer.gate: triton_router(layer.gate, triton) for layer in opened.layers}
        self._routers = {gate: router for gate, router in routers.items() if router}
        attentions = {
            module: each
            for module, each in self._attentions.items()
            if isinstance(each, TokenAttention)
        }
        self._forwards = Forwards(self._norms | attentions | self._blocks | self._routers)

    def install(self, experts: object = None) -> None:
        """Replace modules; experts are the backend's."""
        self._forwards.install()

    def uninstall(self) -> None:
        self._forwards.uninstall()

    def receipt(self) -> dict[str, object]:
        """Return how many modules are compiled, and, by class, why attentions are not."""
        return {
            "norms": len(self._norms),
            **told(self._attentions),
            "blocks": len(self._blocks),
            "routers": len(self._routers),
        }


def _normalise(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    return kernels("gpu.dense.norms").NormKernel(norm).normalise(rows)


class _TritonNorm:
    """RMS norm of tokens of `dtype`."""

    def __init__(self, module: nn.Module, norm: Norm, dtype: torch.dtype) -> None:
        self._theirs = partial(type(module).forward, module)
        self._dtype = dtype
        self._hidden = len(norm.weight)
        self._kernel = kernels("gpu.dense.norms").NormKernel(norm)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Replace the module's forward, x [.., H] -> [.., H]."""
        x = hidden_states
        is_taken = x.dtype is self._dtype and x.shape[-1] == self._hidden and x.is_contiguous()
        if not is_taken or x.requires_grad or not x.numel():
            return self._theirs(x)
        return self._kernel.normalise(x)


class TritonRouter:
    """Router that is a matrix: torch multiplies, so that logits have the model's bits, and a kernel
    does the rest."""

    def __init__(self, gate: nn.Module, output: RouterOutput) -> None:
        self._theirs = partial(type(gate).forward, gate)
        self._weight = gate.weight
        self._bias = getattr(gate, "bias", None)
        self._kernel = kernels("gpu.dense.routing").RoutingKernel(output, len(gate.weight))

    def forward(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        """Replace the module's forward."""
        x = hidden_states
        is_taken = x.dtype is self._weight.dtype and x.numel() and not others and not named
        if not is_taken or x.requires_grad:
            return self._theirs(x, *others, **named)
        return self.route(x)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits [T, E], weights and ids [T, K] of tokens [.., H]."""
        tokens = x.reshape(-1, self._weight.shape[1])
        return self._kernel.route(F.linear(tokens, self._weight, self._bias))


def triton_router(gate: nn.Module, compiled: Compiled) -> TritonRouter | None:
    """Return the router in kernels if it is a matrix and they make the same choices, otherwise
    None."""
    trial = try_router(gate, compiled)
    if trial is None:
        return None
    routers = {TritonRouter(gate, output): output for output in trial.outputs()}
    with torch.no_grad():
        deviations = {router: _deviation(router, trial) for router in routers}
    nearest = min(deviations, key=deviations.get)
    return nearest if deviations[nearest] <= BOUNDS[trial.x.dtype] else None


def _deviation(router: TritonRouter, trial: RouterTrial) -> float:
    """Return the deviation of the tokens whose last expert has no equal; infinite where logits are
    others."""
    logits, weights, ids = router.route(trial.x)
    if not torch.equal(logits, trial.logits):
        return float("inf")
    top_k = ids.shape[1]
    ordered = logits.float().sort(descending=True).values
    is_clear = torch.ones_like(ids[:, 0], dtype=torch.bool)
    if top_k < ordered.shape[1]:
        is_clear = ordered[:, top_k - 1] > ordered[:, top_k]
    if not is_clear.any():
        return float("inf")
    return trial.deviation(logits[is_clear], weights[is_clear], ids[is_clear], is_clear)


def _fixed(layer: DynamicLayer) -> StaticLayer:
    """Return a layer at fixed addresses like this one, with room for one more token."""
    length = layer.keys.shape[2]
    fixed = StaticLayer(length + 1)
    fixed.lazy_initialization(layer.keys, layer.values)
    fixed.cumulative_length.fill_(length)
    fixed.keys[:, :, :length] = layer.keys
    fixed.values[:, :, :length] = layer.values
    return fixed


class _Shares:
    """Memory in which the programs of one attention after another meet: one stream computes
    all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, heads: int, shares: int, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for float32 [heads, shares, numbers], and counts int32 [heads], zero; heads
        of all tokens."""
        key = (heads, shares, numbers)
        if key not in self._kept:
            with torch.inference_mode(False):  # a session forwards within it, `generate` without
                room = torch.empty(key, dtype=torch.float32, device=self._device)
                done = torch.zeros(heads, dtype=torch.int32, device=self._device)
            self._kept[key] = room, done
        return self._kept[key]


class TritonAttention(TokenAttention):
    """Attention module in kernels, for a cache at fixed addresses whose layers count tokens on the
    device. The kernels leave the count as it was: `FixedPast` sets it before each pass."""

    most_tokens = MOST_TOKENS

    def __init__(
        self,
        module: nn.Module,
        heads: Heads,
        rotation: Rotation,
        *,
        num_outputs: int,
        shared: _Shares,
    ) -> None:
        super().__init__(module, heads, rotation, num_outputs=num_outputs)
        self._shared = shared
        query, key = heads.norms or (None, None)
        self._weights = (query and query.weight, key and key.weight)
        self._launches: dict[tuple[int, int, int], tuple[Repeated, Repeated]] = {}

    def num_positions(self, past: object, num_tokens: int = 1) -> int | None:
        layer = _fixed_layer(past, self.layer_index)
        heads = self.heads
        if layer is None or layer.keys.dtype is not self._dtype:
            return None
        if num_tokens > 1 and layer.is_sliding:  # a ring would lose what the first of them sees
            return None
        num_positions = layer.keys.shape[2]
        shapes = [(1, self._num_keys, num_positions, size) for size in (heads.dim, heads.value_dim)]
        return num_positions if [layer.keys.shape, layer.values.shape] == shapes else None

    def attend(
        self,
        x: torch.Tensor,
        past_key_values: Cache,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Angles | None = None,
        **_: object,
    ) -> torch.Tensor:
        heads = self.heads
        layer = past_key_values.layers[self.layer_index]
        is_still = self.rotation.is_still or position_embeddings is None
        cos, sin = (None, None) if is_still else position_embeddings
        room = layer.keys.shape[2]
        num_tokens = x.shape[:-1].numel()
        half, angles = (0, 0) if is_still else (self.num_pairs(cos), cos.shape[-1])
        prepare, attend = self._prepared(room, num_tokens, half, angles)
        query, key, value = (project(x) for project in heads.linear[:3])
        turned = torch.empty_like(query)
        cache = (layer.keys, layer.values, layer.cumulative_length)
        prepare((query, key, value, turned, *cache, *self._weights, cos, sin))
        mask = attention_mask
        if mask is not None and mask.dtype is torch.bool:
            mask = mask.view(torch.uint8)
        num_heads = num_tokens * heads.count
        shares = self._shared.of(num_heads, _num_shares(room), heads.value_dim + 2)
        out = x.new_empty(*x.shape[:-1], heads.count * heads.value_dim)
        attend((turned, *cache, mask, heads.sinks, *shares, out))
        return heads.output(out)

    def _is_mask(self, mask: torch.Tensor | None, num_tokens: int, num_positions: int) -> bool:
        """Do the same as `TokenAttention._is_mask`; the kernel itself hides what follows a token,
        so that the host need not read the mask."""
        if mask is None or num_tokens == 1:
            return super()._is_mask(mask, num_tokens, num_positions)
        is_known = mask.dtype is torch.bool or mask.dtype is self._dtype
        is_sized = mask.shape == (1, 1, num_tokens, num_positions)
        return is_known and is_sized and mask.is_contiguous()

    def _prepared(
        self, room: int, num_tokens: int, half: int, angles: int
    ) -> tuple[Repeated, Repeated]:
        """Return the launches for a cache with this room, and `half` rotated pairs of a token,
        which has that many `angles`."""
        key = (room, num_tokens, half)
        if key not in self._launches:
            prepare = self._prepare(room, num_tokens, half, angles)
            self._launches[key] = prepare, self._attend(room, num_tokens)
        return self._launches[key]

    def _prepare(self, room: int, num_tokens: int, half: int, angles: int) -> Repeated:
        heads = self.heads
        rotation = self.rotation
        norms = heads.norms or (None, None)
        spans = [len(norm.weight) if norm else heads.dim for norm in norms]
        sizes = (
            (heads.count, self._num_keys, heads.dim, heads.value_dim, room, *spans)
            + tuple(norm.eps if norm else 0.0 for norm in norms)
            + (half, angles, int(rotation.is_paired), int(rotation.is_each), int(rotation.is_wide))
            + (int(norms[0] is not None and norms[0].is_rounded),)
        )
        rows = max(1, _NUMBERS // width(heads.dim))
        grid = (blocks(heads.count, rows) + 2 * blocks(self._num_keys, rows), num_tokens)
        return Repeated(
            kernels("gpu.dense.attention").prepare, grid, sizes,
            is_late=rotation.is_late, rows=rows, block=width(heads.dim),
            value_block=width(heads.value_dim), query_block=width(spans[0]),
            key_block=width(spans[1]),
        )  # fmt: skip

    def _attend(self, room: int, num_tokens: int) -> Repeated:
        heads = self.heads
        shares = _num_shares(room)
        own = kernels("gpu.dense.attention")
        return Repeated(
            own.attend, (heads.count, shares, num_tokens),
            (heads.groups, heads.dim, heads.value_dim, room, heads.scaling),
            positions=own.POSITIONS, block=width(heads.dim),
            value_block=width(heads.value_dim), shares=shares,
        )  # fmt: skip


def _fixed_layer(past: object, index: int) -> StaticLayer | None:
    """Return the layer of a cache at fixed addresses, or None. A `StaticCache` of transformers is
    none: its layers count by themselves."""
    if type(past) not in (Cache, DynamicCache) or len(past.layers) <= index:
        return None
    layer = past.layers[index]
    return layer if isinstance(layer, StaticLayer) and layer.is_initialized else None


def _num_shares(room: int) -> int:
    """Return how many programs share the positions of a head, a power of two."""
    own = kernels("gpu.dense.attention")
    return min(width(blocks(room, own.POSITIONS)), own.MOST_SHARES)


class _TritonBlock(TokenBlock):
    """Layer of a decoder whose attention's sum and norm are one kernel."""

    def __init__(self, module: nn.Module, parts: BlockParts, *, num_outputs: int) -> None:
        super().__init__(module, parts, num_outputs=num_outputs)
        own = kernels("gpu.dense.norms")
        self._before = own.NormKernel(parts.before)
        self._behind = own.NormKernel(parts.behind)

    def attend(self, x: torch.Tensor, **named: object) -> torch.Tensor:
        added = self._attention.attend(self._before.normalise(x), **named)
        normalised = self._behind.normalise(x, added)
        return self.mix(added, normalised)
