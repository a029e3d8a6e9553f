"""Engines that advice is given for: how they keep experts, and their flags."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from runtime.replay.pool import SOONEST

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Where a run keeps and computes what it needs.

    `share` of the layers have all their experts on the GPU. Those of the others are in RAM: copies
    of the most used in `pinned_nbytes` of the GPU's memory, and of any in a cache of
    `cache_nbytes`. The CPU computes `near_share` of those that are missing there; the others are
    loaded. `is_on_cpu`: nothing is on a GPU.
    """

    share: float = 0.0
    cache_nbytes: int = 0
    near_share: float = 1.0
    pinned_nbytes: int = 0
    is_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What flags are written for: the model, as a path or the names of its repositories (`gguf` is
    empty for a path), its placement and its experts' `num_layers`, `num_experts` a layer and bytes,
    `context` tokens, drafts a pass (0: none)."""

    model: str
    gguf: str
    placement: ExpertPlacement
    num_layers: int
    num_experts: int
    experts_nbytes: int
    context: int
    drafts: int = 0

    @property
    def on_gpu(self) -> float:
        """The share of the experts that the GPU's memory holds."""
        placed = self.placement
        return placed.share + (placed.cache_nbytes + placed.pinned_nbytes) / self.experts_nbytes


@dataclass(frozen=True, slots=True)
class AdvisedEngine:
    """An engine by name, in the version whose documents were read (`source`).

    `keeps` tells which experts it has on the GPU; its pool over all layers evicts by `num_classes`
    classes of use. `options` yields its placements for a number of bytes, `has_whole_layers` where
    it may place whole layers instead. `has_stored_weights`: other weights stay in memory as they
    are stored. `drafts_by`: its option for MTP layers, if it uses them.
    """

    name: str
    version: str
    source: str
    keeps: str
    options: Callable[[int], Iterator[ExpertPlacement]]
    flags: Callable[[Run], str]
    num_classes: int = 1
    has_whole_layers: bool = False
    has_stored_weights: bool = True
    drafts_by: str = ""


def engine_of(name: str) -> AdvisedEngine:
    """Return the engine of that name. Raises BadUsage with the known ones."""
    if name.lower() not in ENGINES:
        raise BadUsage(unknown("engine", name, ENGINES))
    return ENGINES[name.lower()]


def _cached(*near_shares: float) -> Callable[[int], Iterator[ExpertPlacement]]:
    """Return a cache of so many bytes, with each of these shares of the misses on the CPU."""

    def options(nbytes: int) -> Iterator[ExpertPlacement]:
        for share in near_shares:
            yield ExpertPlacement(cache_nbytes=nbytes, near_share=share)

    return options


def _pinned(nbytes: int) -> Iterator[ExpertPlacement]:
    yield ExpertPlacement(pinned_nbytes=nbytes)


def _llama_cpp(run: Run) -> str:
    placed = run.placement
    parts = ["-ngl 99"]
    if placed.cache_nbytes:
        # pinned host memory, which mmap'd weights are not
        parts += ["-cmoe -lm none", f"--moe-cache-mib {placed.cache_nbytes // MIB}"]
        if placed.near_share:
            parts.append(f"--moe-cache-cpu-share {placed.near_share:g}")
    elif placed.share < 1:
        parts.append(f"--n-cpu-moe {run.num_layers - round(placed.share * run.num_layers)}")
    if placed.is_on_cpu:
        parts = ["-ngl 0"]
    if run.drafts:
        parts.append(f"--spec-type draft-mtp --spec-draft-n-max {run.drafts}")
    model = f"-hf {run.gguf}" if run.gguf else f"-m {run.model}"
    return " ".join((f"llama-server {model}", *parts, f"-c {run.context}"))


def _free_token(run: Run) -> str:
    strategy = "hybrid" if run.placement.near_share else "offload"
    cache = f"--moe-strategy {strategy} --moe-cache-rate {run.on_gpu:.2f}"
    if run.placement.share == 1:
        cache = "--moe-strategy fused"
    return f"ft serve --model {run.model} {cache} --max-seq-len-override {run.context}"


def _strata(run: Run) -> str:
    drafts = f" --spec {run.drafts}" if run.drafts else ""
    return (
        f"--native {run.gguf or run.model} --expert-cache auto --max-context {run.context}{drafts}"
    )


def _ktransformers(run: Run) -> str:
    number = int(run.on_gpu * run.num_experts)
    return (
        f"python -m sglang.launch_server --model {run.model} --kt-num-gpu-experts {number} "
        f"--kt-expert-placement-strategy frequency --context-length {run.context}"
    )


def _moectl(run: Run) -> str:
    miss = {0.0: "", 1.0: " --miss near"}.get(run.placement.near_share, " --miss qstar")
    how = f" --budget {100 * run.on_gpu:.3g}% --eviction class_lru --scope global{miss}"
    return f"moectl run {run.model}{how if run.on_gpu < 1 else ''}"


ENGINES = {
    engine.name: engine
    for engine in (
        AdvisedEngine(
            "llama.cpp",
            "b12569",
            "docs/moe-cache.md at b12191, its tuner and release notes",
            "evicted by class_lru",
            _cached(0.0, 0.5, 0.8, 0.95),
            _llama_cpp,
            num_classes=8,
            has_whole_layers=True,
            drafts_by="--spec-type draft-mtp",
        ),
        AdvisedEngine(
            "strata",
            "v0.2.18",
            "docs/HOW_IT_WORKS.md and starts that users posted",
            "the most used in the first half of the requests",
            _pinned,
            _strata,
            drafts_by="--spec",
        ),
        AdvisedEngine(
            "freetoken",
            "0.2.0",
            "docs/cli.md and moe/offload_kernels.py",
            "evicted by lru",
            _cached(0.0, SOONEST),
            _free_token,
        ),
        AdvisedEngine(
            "ktransformers",
            "v0.6.1",
            "experts-sched-Tutorial.md",
            "the most used in the first half of the requests",
            _pinned,
            _ktransformers,
        ),
        AdvisedEngine(
            "moectl",
            "this version",
            "its own options",
            "evicted by class_lru",
            _cached(0.0, SOONEST, 1.0),
            _moectl,
            num_classes=8,
            has_stored_weights=False,
        ),
    )
}
