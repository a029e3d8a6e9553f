"""Decoded tokens whose experts the host decides on, and the same decided by the device, in turns at
a quarter of the experts, on demand and with prefetches, in two orders: milliseconds a token, and
whether both said and counted the same. And a layer of the device's road in a CUDA graph, all of
whose experts are there.

python -m tools.gpu.probes.road
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from runtime.control.counters import hit_rate
from runtime.model.open import MoeModel
from runtime.session.session import Session
from runtime.session.settings import DEVICE, HOST
from tools.gpu.checks.exactness import COARSE
from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed
from tools.gpu.probes.small_model import settings_of, small_olmoe
from tools.gpu.timing import finish, microseconds

PROMPT = 32
TOKENS = 32
ROUNDS = 3
CALLS = 20
LAYERS = 2
WAYS = {
    "on demand": {},
    "next gate": {"prefetch": "next_gate"},
    "late horizon, next gate where likely": {
        "eviction": "late_horizon",
        "prefetch": "next_gate:least=0.02",
    },
}


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Milliseconds of each token, logits [tokens, V], and counters of the tokens' passes."""

    ms: list[float]
    logits: torch.Tensor
    counters: dict[str, int]


def main() -> None:
    options = parsed(__doc__)
    tokens, rounds = (4, 1) if options.tiny else (TOKENS, ROUNDS)
    with small_olmoe(options, layers=LAYERS, length=PROMPT + tokens) as (opened, ids):
        for way in WAYS:
            told(way, compared(opened, ids, way, options.device, rounds=rounds))


def compared(
    opened: MoeModel, ids: np.ndarray, way: str, device: str, *, rounds: int
) -> dict[str, list[Decoded]]:
    """Return the decoded runs by the side that decides, one for each round; one round before them
    compiles."""
    found = defaultdict(list)
    own = {"policies": WAYS[way], "window": f"{2 * opened.shape.expert_nbytes}B"}
    for turn in range(rounds + 1):
        for decide in roads(device):
            with Session(opened, settings_of(device, decide=decide, **own)) as session:
                decoded = decode(session, ids)
                if turn:
                    found[decide].append(decoded)
                elif decide == DEVICE and not WAYS[way]:
                    tell(name="a layer of the device's road, captured", **layer_us(session))
    return found


def roads(device: str) -> tuple[str, ...]:
    """Return who can decide on this device: the host, and on a GPU the device as well."""
    return (HOST,) if device == "cpu" else (HOST, DEVICE)


def decode(session: Session, ids: np.ndarray) -> Decoded:
    given = torch.from_numpy(ids)[None]
    device = str(session.opened.model.device)
    ms = []
    said = []
    past = session.forward(given[:, :PROMPT]).past_key_values
    first_pass = session.num_passes
    for position in range(PROMPT, given.shape[1]):
        finish(device)
        begin_s = time.perf_counter()
        now = session.forward(given[:, position : position + 1], past=past)
        finish(device)
        ms.append((time.perf_counter() - begin_s) * 1e3)
        past = now.past_key_values
        said.append(now.logits[0, -1].float().cpu())
    return Decoded(ms, torch.stack(said), session.controller.counters.totals(first_pass=first_pass))


@torch.inference_mode()
def layer_us(session: Session) -> dict[str, float]:
    """Microseconds of a layer's kernels on the device, replayed from a graph with the same experts
    each time."""
    opened = session.opened
    shape = session.opened.shape
    device = str(session.opened.model.device)
    hidden = torch.randn(1, opened.config.hidden_size, dtype=opened.dtype, device=device)
    ids = torch.arange(shape.top_k, device=device)[None]
    weights = torch.full((1, shape.top_k), 0.5, dtype=opened.dtype, device=device)
    run = partial(session.engine.road.forward, 0, hidden, ids, weights)
    run()
    return {"us": microseconds(lambda turn: run(), 1, CALLS, device)}


def told(way: str, found: dict[str, list[Decoded]]) -> None:
    """A line for each road, and one that compares them."""
    for decide, runs in found.items():
        rate = hit_rate(runs[0].counters)
        tell(
            name=f"{way}, decided by the {decide}",
            ms_per_token=median_ms(runs),
            hit_rate=rate,
            rounds=len(runs),
        )
    if DEVICE in found:
        host = found[HOST]
        device = found[DEVICE]
        counted_alike = all(
            one.counters == other.counters for one, other in zip(host, device, strict=True)
        )
        error = max(
            _error(one.logits, other.logits) for one, other in zip(device, host, strict=True)
        )
        ratio = statistics.median(
            median_ms([one]) / median_ms([two]) for one, two in zip(host, device, strict=True)
        )
        # with other bits a router may choose otherwise
        passed = error <= COARSE and (counted_alike or error > 0)
        detail = f"counters {'equal' if counted_alike else 'DIFFER'}"
        tell(
            name=f"{way}, both roads",
            passed=passed,
            detail=detail,
            relative=error,
            times_as_fast=ratio,
        )


def median_ms(runs: list[Decoded]) -> float:
    """Return the median of the tokens of all runs."""
    return statistics.median(ms for run in runs for ms in run.ms)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


if __name__ == "__main__":
    main()
