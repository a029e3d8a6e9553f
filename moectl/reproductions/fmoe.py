"""fMoE, Figures 3, 10, 12 and 13: the gain by stored expert maps, on requests that are not among the maps."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import ModelShape, unsized
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from moectl.reproductions.report import UNKNOWN, Claim, Reproduction
from moectl.show.render import Sheet
from runtime.control.counters import hit_rate
from runtime.policies.base import Artefacts
from runtime.replay import from_trace
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload

BUDGET, SCOPES, CAPACITY, EVERYTHING = "25%", ("layer", "global"), 1000, 32_768
LEAD = 2  # layers ahead; a match is used one layer later, so that this is the paper's d = 3
PAPERS = f"map:distance={LEAD}"
SYSTEMS = ("fmoe", "moe-infinity", "mixtral-offloading", "on-demand")
CONTROLS = {"random experts": "random", "most frequent": "popular"}
PATTERNS = {
    "speculate": "next_gate",
    "hit count": f"frequency:distance={LEAD}",
    "map T": f"map:distance={LEAD},semantic=no,threshold=no",
    "map T+S": f"map:distance={LEAD},threshold=no",
    "map T+S+delta": PAPERS,
}
EVICTIONS = ("lru", "lfu", "map")
_MACHINE = "a100-pcie4"


@dataclass(frozen=True, slots=True)
class Study:
    """The replayed requests, with maps of the other requests: at the capacity of the paper, and all of them."""

    source: str
    held: Trace
    model: ModelShape
    workloads: dict[int, Workload]  # by capacity; 0 starts without maps
    learning: dict[int, Workload]  # by capacity; finished iterations join the maps
    maps: dict[int, ExpertMaps]  # by capacity
    num_requests: tuple[int, int]

    @property
    def num_foreseen(self) -> int:
        """Layers ahead for speculation: as many as for maps, or as many as the trace predicts."""
        return min(LEAD, self.held.predicted.shape[1])

    def run(self, label: str, capacity: int = CAPACITY, *, scope: str = "layer", **policies: str) -> Outcome:
        return self.workloads[capacity].run(Setting(label, policies=policies, scope=scope, budget=BUDGET))

    def preset(self, name: str, capacity: int, scope: str, *, learns: bool = False) -> Outcome:
        workload = (self.learning if learns else self.workloads)[capacity]
        return workload.run(Setting(name, name, scope=scope, budget=BUDGET))


def reproduce(trace: Path | None = None) -> Reproduction:
    """Replay the last quarter of the requests of this trace, by default one of the bundled model.

    Raises BadInput for a trace without embeddings, probabilities or predictions, or with one request only.
    """
    study = _study(trace)
    systems, patterns, evictions = _systems(study), _patterns(study), _evictions(study)
    distances, online, entropies = _distances(study), _online(study), _entropies(study)
    columns = ("policies", "paper", "maps", "hit rate", "in one cache", "misses", "prefetched", "wasted")
    return Reproduction(
        name="fmoe",
        paper="fMoE (Yu et al., 2025, arXiv:2502.05370), Figures 3, 10, 12 and 13",
        sheets={
            "systems": Sheet(f"Systems at {BUDGET}", columns, [_system_row(*row) for row in systems]),
            "patterns": _sheet("Figure 12a: what is prefetched by (lfu evicts)", patterns),
            "evictions": _sheet("Figure 12b: what is evicted by (map:distance=2 prefetches)", evictions),
            "distances": _distance_sheet(distances),
            "online": _sheet("Figure 10: beginning with an empty store", online),
            "entropy": Sheet("Figure 3: entropies over ln E", ("of", "paper", "entropy"), entropies),
        },
        claims=_claims(systems, patterns, evictions, distances, online, entropies),
        assumed=_assumed(study),
    )


def _study(path: Path | None) -> Study:
    recorded, model, source = _bundled() if path is None else _from_file(path)
    requests = np.unique(recorded.request)
    if len(requests) < 2:
        raise BadInput(f"{source} has one request: some are to make the maps of the others")
    held = requests[-max(1, len(requests) // 4) :]
    is_held = np.isin(recorded.request, held)
    others, replayed = recorded.take(~is_held), recorded.take(is_held)
    maps = {
        size: from_trace.maps(others, model.shape, capacity=size, distance=LEAD + 1) for size in (CAPACITY, EVERYTHING)
    }
    window = model.shape.top_k * model.shape.expert_nbytes

    def workloads(learns: bool) -> dict[int, Workload]:
        known = {size: Artefacts(maps=stored, learns_maps=learns) for size, stored in maps.items()}
        return {
            size: Workload(replayed, model, machine(_MACHINE), artefacts=artefacts, window=window)
            for size, artefacts in ({0: Artefacts()} | known).items()
        }

    counts = (len(requests) - len(held), len(held))
    return Study(source, replayed, model, workloads(False), workloads(True), maps, counts)


def _from_file(path: Path) -> tuple[Trace, ModelShape, str]:
    trace = read_parquet(path)
    if trace.probabilities is None or trace.iteration is None or trace.predicted is None:
        raise BadInput(
            f"{path} lacks probabilities, predictions or embeddings: record it with "
            f"`moectl run --prefetch next_gate:distance={LEAD} --trace FILE`"
        )
    return trace, unsized(trace.num_layers, trace.probabilities.shape[1], trace.top_k), str(path)


def _bundled() -> tuple[Trace, ModelShape, str]:
    """Requests of held-out text, teacher-forced through the bundled model."""
    from moectl.reproductions.requests import bundled_requests

    return bundled_requests(distance=LEAD)


def _systems(study: Study) -> list[tuple[str, int | None, list[Outcome]]]:
    """Label, number of maps at the start, and the outcome in each scope."""
    rows = []
    for capacity, maps in study.maps.items():
        for label, learns in ((SYSTEMS[0], True), ("fmoe, not learning", False)):
            rows.append((label, len(maps), [study.preset("fmoe", capacity, scope, learns=learns) for scope in SCOPES]))
    rows += [(name, None, [study.preset(name, CAPACITY, scope) for scope in SCOPES]) for name in SYSTEMS[1:]]
    for label, policy in CONTROLS.items():
        rows.append((label, None, [study.run(label, prefetch=policy, scope=scope) for scope in SCOPES]))
    bound = {"eviction": "belady", "prefetch": "oracle"}
    rows.append(("oracle", None, [study.run("oracle", scope=scope, **bound) for scope in SCOPES]))
    return rows


def _patterns(study: Study) -> list[Outcome]:
    ways = PATTERNS | {"speculate": f"next_gate:distance={study.num_foreseen}"} | CONTROLS
    return [study.run(label, EVERYTHING, prefetch=policy, eviction="lfu") for label, policy in ways.items()]


def _evictions(study: Study) -> list[Outcome]:
    return [study.run(name, EVERYTHING, prefetch=PAPERS, eviction=name) for name in EVICTIONS]


def _distances(study: Study) -> list[tuple[int, list[Outcome]]]:
    """Outcomes by the paper's d: with a link that carries one expert a layer, and one that carries top-k experts."""
    full = study.workloads[EVERYTHING]
    known = Artefacts(maps=study.maps[EVERYTHING])
    one = Workload(full.trace, full.model, full.machine, artefacts=known, window=study.model.shape.expert_nbytes)
    rows = []
    for distance in range(1, min(6, study.model.shape.num_layers - 1) + 1):
        policies = {"prefetch": f"map:distance={distance}", "eviction": "map"}
        setting = Setting(f"d = {distance + 1}", policies=policies, scope="layer", budget=BUDGET)
        rows.append((distance + 1, [one.run(setting), full.run(setting)]))
    return rows


def _online(study: Study) -> list[Outcome]:
    return [study.preset(name, 0, "layer") for name in SYSTEMS]


def _entropies(study: Study) -> list[tuple]:
    _, probabilities = from_trace.iterations(study.held, study.model.shape)
    request = study.held.request[np.unique(study.held.iteration, return_index=True)[1]]
    by_request = np.stack([probabilities[request == one].mean(axis=0) for one in np.unique(request)])
    parts = {
        "all requests together": probabilities.mean(axis=0)[None],
        "a request (coarse)": by_request,
        "an iteration (fine)": probabilities,
    }
    return [(label, UNKNOWN, float(_entropy(part).mean())) for label, part in parts.items()]


def _entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1) / np.log(p.shape[-1])


def _system_row(label: str, num_maps: int | None, found: list[Outcome]) -> tuple:
    own, other = found
    return (label, UNKNOWN, num_maps, hit_rate(own.counters), hit_rate(other.counters), *_moved(own))


def _moved(outcome: Outcome) -> tuple[int, float, float]:
    """Misses, and prefetched and wasted experts per request."""
    counts, size = outcome.counters, outcome.fast_nbytes / outcome.num_slots
    requests = counts["requests"]
    return (counts["misses"], counts["prefetch_bytes"] / size / requests, counts["wasted_bytes"] / size / requests)


def _sheet(title: str, outcomes: list[Outcome]) -> Sheet:
    rows = [(outcome.setting.label, UNKNOWN, hit_rate(outcome.counters), *_moved(outcome)) for outcome in outcomes]
    return Sheet(title, ("by", "paper", "hit rate", "misses", "prefetched", "wasted"), rows)


def _distance_sheet(rows: list[tuple[int, list[Outcome]]]) -> Sheet:
    shown = [(d, UNKNOWN, *(hit_rate(outcome.counters) for outcome in found)) for d, found in rows]
    columns = ("d", "paper", "hit rate, one expert a layer", "hit rate, k experts a layer")
    return Sheet("Figure 13: prefetch distance", columns, shown)


def _claims(
    systems: list[tuple[str, int | None, list[Outcome]]],
    patterns: list[Outcome],
    evictions: list[Outcome],
    distances: list[tuple[int, list[Outcome]]],
    online: list[Outcome],
    entropies: list[tuple],
) -> tuple[Claim, ...]:
    rates = {outcome.setting.label: hit_rate(outcome.counters) for outcome in patterns[: len(PATTERNS)]}
    kept = {outcome.setting.label: hit_rate(outcome.counters) for outcome in evictions}
    at_first = {outcome.setting.label: hit_rate(outcome.counters) for outcome in online}
    others = [outcome for name, _, found in systems if name in SYSTEMS[1:] for outcome in found]
    best_other = max(hit_rate(outcome.counters) for outcome in others)
    mine = [hit_rate(found[0].counters) for name, _, found in systems if name == SYSTEMS[0]]
    best = [max(distances, key=lambda row: hit_rate(row[1][which].counters))[0] for which in (0, 1)]
    coarse, fine = entropies[1][2], entropies[2][2]
    return (
        Claim(
            "hits more often than the best other system in either cache",
            "by 39 %",
            _gains(mine, best_other),
            mine[-1] > best_other,
        ),
        Claim("12a: each pattern hits more often than the one before", "yes", _order(rates), _rises(rates)),
        Claim("12b: lru, lfu, map, rising", "yes", _order(kept), _rises(kept)),
        Claim("13: the best prefetch distance", "3", f"{best[0]} and {best[1]}", best == [3, 3]),
        Claim("10: from an empty store more hits than the others", "yes", _order(at_first), _leads(at_first)),
        Claim("3: an iteration is less undecided than a request", "yes", f"{fine:.3f} to {coarse:.3f}", fine < coarse),
    )


def _gains(mine: list[float], other: float) -> str:
    return f"by {mine[0] / other - 1:+.1%} with the fewer maps, {mine[-1] / other - 1:+.1%} with all".replace("%", " %")


def _order(rates: dict[str, float]) -> str:
    return " < ".join(f"{name} {rate:.3f}" for name, rate in sorted(rates.items(), key=lambda pair: pair[1]))


def _rises(rates: dict[str, float]) -> bool:
    values = list(rates.values())
    return all(first < second for first, second in zip(values, values[1:], strict=False))


def _leads(rates: dict[str, float]) -> bool:
    return max(rates, key=rates.get) == SYSTEMS[0]


def _assumed(study: Study) -> tuple[str, ...]:
    before, after = study.num_requests
    fewer, more = map(len, study.maps.values())
    return (
        f"{study.source}: {before} requests make the maps, {fewer:,} or {more:,}; the other {after} are replayed, with "
        "their prompts",
        f"{BUDGET} of the experts, from an empty cache; each layer its own share (hit rate), or all in one cache; as "
        "many experts as a token selects may come ahead in a layer; prefetched and wasted: experts a request",
        "a match is used one layer after the layer that it is of: the paper's d is the policy's distance + 1; in "
        f"Figure 12a all look two layers ahead, speculate {study.num_foreseen}; the systems look one layer ahead",
        "learning: iterations join the maps when they are over; in Figures 12 and 13 none do",
        "the first layer's experts come on demand: nothing is known of a pass before it begins",
        "Figures 12 and 13 use all maps; of the paper's figures only its headline is available here",
    )
