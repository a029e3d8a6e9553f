"""Cost of matching expert maps per layer, beside the attention block of the same layer on the same
machine.

    OMP_NUM_THREADS=1 python -m tools.bench.traces.maps

One token a request is decoded: after every layer its distribution is matched with all maps, and the
best map says which experts to bring and how urgently. Beside it the same search over the whole
prefix again, and what prefetch policy `map` keeps a step waiting with, its matching at once and on
its own thread. Each comes right after the attention of a layer with its projections, as in a model,
which leaves nothing in the caches. Contents are random: time does not depend on them.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeAttention,
    Qwen2MoeRotaryEmbedding,
)

from artifacts.routing.expert_maps import (
    DTYPES,
    ExpertMaps,
    Trajectories,
    best_matches,
    priorities,
    select_experts,
)
from artifacts.shape import Shape
from artifacts.traces.trace import DECODE
from moectl.show.render import Sheet, human_bytes, show_sheet
from runtime.policies.base import Artefacts, Now, Step
from runtime.policies.prefetch.map import MapPrefetch
from runtime.policies.shared.maps import Matching
from runtime.policies.step import Opening
from tools.arguments import parser_of

DISTANCE = 3
TOP_K = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a measurement; the defaults are a thousand maps of Qwen1.5-MoE."""

    maps: int = 1000
    layers: int = 24
    experts: int = 60
    hidden: int = 2048
    heads: int = 16
    positions: int = 512
    requests: int = 1


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds [passes, L] of each part, and [passes] of the search by embedding, which happens once
    a pass."""

    attention: np.ndarray
    incremental: np.ndarray
    recomputed: np.ndarray
    choosing: np.ndarray
    semantic: np.ndarray
    at_once: np.ndarray
    beside: np.ndarray


class _Filled:
    """Preset keys and values: storing one more costs nothing, which favours attention."""

    def __init__(self, known: torch.Tensor) -> None:
        self._known = known

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._known, self._known


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    maps = random_maps(sizes, options.dtype)
    attend = attention(sizes, device=options.device, dtype=getattr(torch, options.attention_dtype))
    show_sheet(sheet(measure(maps, sizes, attend, passes=options.passes), maps, sizes, options))


def random_maps(sizes: Sizes, dtype: str) -> ExpertMaps:
    random = np.random.default_rng(0)
    embeddings = random.standard_normal((sizes.maps, sizes.hidden), np.float32)
    maps = ExpertMaps(
        sizes.maps,
        num_layers=sizes.layers,
        num_experts=sizes.experts,
        hidden=sizes.hidden,
        distance=min(DISTANCE, sizes.layers),
        dtype=dtype,
    )
    maps.add(embeddings, _distributions(random, sizes.maps, sizes))
    return maps


def attention(sizes: Sizes, *, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """Attention of one layer on one more token of each request, including the wait for its
    result."""
    config = Qwen2MoeConfig(
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    block = Qwen2MoeAttention(config, layer_idx=0).to(device, dtype).eval()
    rotary = Qwen2MoeRotaryEmbedding(config).to(device)
    x = torch.randn(sizes.requests, 1, sizes.hidden, device=device, dtype=dtype)
    known = torch.randn(
        sizes.requests, sizes.heads, sizes.positions, sizes.hidden // sizes.heads
    ).to(device, dtype)
    past = _Filled(known)
    places = rotary(x, torch.full((sizes.requests, 1), sizes.positions, device=device))

    def attend() -> None:
        with torch.inference_mode():
            block(x, places, None, past_key_values=past)
        if x.is_cuda:
            torch.cuda.synchronize()

    return attend


def measure(maps: ExpertMaps, sizes: Sizes, attend: Callable[[], None], *, passes: int) -> Seconds:
    """Times of `passes` passes, after one for warm-up."""
    random = np.random.default_rng(1)
    flat = np.ascontiguousarray(maps.probabilities).reshape(len(maps), -1)
    found = [
        _one_pass(maps, flat, _distributions(random, sizes.requests, sizes), attend)
        for _ in range(passes + 1)
    ]
    embeddings = random.standard_normal((passes, sizes.requests, sizes.hidden), np.float32)
    semantic = [_after(attend, by_embedding, maps, one)[1] for one in embeddings]
    policy = [
        policy_steps(maps, sizes, attend, passes=passes, in_background=beside)
        for beside in (False, True)
    ]
    return Seconds(*np.array(found[1:]).transpose(2, 0, 1), np.array(semantic), *policy)


def policy_steps(
    maps: ExpertMaps, sizes: Sizes, attend: Callable[[], None], *, passes: int, in_background: bool
) -> np.ndarray:
    """Seconds [passes, L] that a step waits for the prefetch policy map, after one pass for
    warm-up."""
    shape = Shape(sizes.layers, sizes.experts, min(TOP_K, sizes.experts), expert_nbytes=1)
    matching = Matching(maps, shape)
    policy = MapPrefetch()
    random = np.random.default_rng(2)
    policy.prepare(shape, Artefacts(matching=matching))
    if in_background:
        matching.run_in_background()
    last = np.arange(sizes.requests)
    selected = np.zeros((sizes.requests, shape.top_k), np.int64)
    seconds = np.zeros((passes + 1, sizes.layers))
    for number in range(passes + 1):
        seen = _distributions(random, sizes.requests, sizes)
        given = random.standard_normal((sizes.requests, sizes.hidden), np.float32)
        for layer in range(sizes.layers):
            weights = np.ones(selected.shape, np.float32)
            step = Step(
                number, DECODE, layer, selected, weights, seen[:, layer], last=last, embedding=given
            )
            if in_background:
                matching.begin(Opening(number, DECODE, given))
            seconds[number, layer] = _after(attend, policy.propose, step, Now())[1]
    matching.close()
    return seconds[1:]


def _one_pass(
    maps: ExpertMaps, flat: np.ndarray, seen: np.ndarray, attend: Callable[[], None]
) -> list[list[float]]:
    """Time each layer: attention, the next layer of the search, the search from the start, the
    choice of experts."""
    under_way = maps.begin(len(seen))
    layers = []
    for layer in range(maps.num_layers):
        attention_s, incremental_s = _after(attend, next_layer, under_way, seen[:, layer])
        _, recomputed_s = _after(attend, whole_prefix, flat, seen[:, : layer + 1])
        ahead = min(layer + maps.distance, maps.num_layers - 1)
        _, choosing_s = _after(attend, choose, maps, under_way.scores(), ahead)
        layers.append([attention_s, incremental_s, recomputed_s, choosing_s])
    return layers


def next_layer(under_way: Trajectories, probabilities: np.ndarray) -> np.ndarray:
    under_way.update(probabilities)
    return under_way.scores()


def by_embedding(maps: ExpertMaps, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return best_matches(maps.semantic_scores(embeddings))


def whole_prefix(flat: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Cosines [R, N] of `prefix` [R, l, E] with maps [N, L * E] in one product; norms of the maps
    are precomputed."""
    query = prefix.reshape(len(prefix), -1)
    lengths = np.sqrt(np.vecdot(query, query))[:, None]
    return query @ flat[:, : query.shape[1]].astype(np.float32, copy=False).T / lengths


def choose(maps: ExpertMaps, scores: np.ndarray, layer: int) -> list[tuple[list[int], np.ndarray]]:
    """The choice of a policy from scores [R, N]: each request's experts of a layer and their
    urgency."""
    rows, best = best_matches(scores)
    chosen = []
    for probabilities, score in zip(maps.layer(rows, layer), best.tolist(), strict=True):
        experts = select_experts(probabilities, score, TOP_K)
        chosen.append((experts, priorities(probabilities[experts], maps.distance)))
    return chosen


def sheet(seconds: Seconds, maps: ExpertMaps, sizes: Sizes, options: argparse.Namespace) -> Sheet:
    parts = {
        "attention block, a layer": seconds.attention,
        "matching and choosing, a layer": seconds.incremental + seconds.choosing,
        "matching, a layer": seconds.incremental,
        "matching, the last layer": seconds.incremental[:, -1],
        "from the start, a layer": seconds.recomputed,
        "from the start, the last layer": seconds.recomputed[:, -1],
        "by embedding, once a pass": seconds.semantic,
        "policy map, a step, at once": seconds.at_once,
        "policy map, a step, on its thread": seconds.beside,
        "policy map, its first step, on its thread": seconds.beside[:, 0],
    }
    medians = {name: float(np.median(part)) for name, part in parts.items()}
    rows = [
        (
            name,
            *(np.percentile(part, (50, 25, 75)) * 1e6),
            medians[name] / medians["attention block, a layer"],
        )
        for name, part in parts.items()
    ]
    all_layers, last = (
        medians[f"from the start, {which}"] / medians[f"matching, {which}"]
        for which in ("a layer", "the last layer")
    )
    note = (
        f"from the start / layer by layer: {all_layers:.1f} over all layers, {last:.1f} at the "
        f"last (of medians)\n{len(maps):,} maps, L={sizes.layers} E={sizes.experts} "
        f"H={sizes.hidden}, {maps.dtype}: {human_bytes(maps.nbytes)}; requests {sizes.requests}, "
        f"positions {sizes.positions}, passes {options.passes}\nattention in "
        f"{options.attention_dtype} on {options.device}, threads {options.threads}"
    )
    return Sheet(
        "Matching expert maps",
        ("part", "median us", "25 %", "75 %", "share of attention"),
        rows,
        note,
    )


def _distributions(random: np.random.Generator, count: int, sizes: Sizes) -> np.ndarray:
    """Random distributions [count, L, E], float32."""
    parts = np.exp(2 * random.standard_normal((count, sizes.layers, sizes.experts), np.float32))
    return parts / parts.sum(axis=2, keepdims=True)


def _after(
    attend: Callable[[], None], call: Callable[..., object], *arguments: object
) -> tuple[float, float]:
    """Seconds of attention, and of the work after it."""
    start = time.perf_counter()
    attend()
    middle = time.perf_counter()
    call(*arguments)
    return middle - start, time.perf_counter() - middle


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="of the maps")
    parser.add_argument(
        "--attention-dtype", default="float32", choices=("float32", "bfloat16", "float16")
    )
    parser.add_argument("--device", default="cpu", help="of attention; maps are matched on the CPU")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of attention")
    return parser.parse_args()


if __name__ == "__main__":
    main()
