"""Speed of `moectl generate` at 1, 16, 64 and 256 requests at a time, and what bounds it.

    python -m tools.bench.serving.batches                              prints the table
    python -m tools.bench.serving.batches --write docs/generate.md     puts it there
    python -m tools.bench.serving.batches --rows 64 --presets horizon+near --rounds 1

The bundled model over a link, and beside a near tier, in the proportions of a machine. Time is the
CPU time of this process, on one thread, plus its waits for the emulated link: other work of the
machine changes neither. A step is a pass in which every request decodes one token; `compute` is the
same step with every expert resident. The aims are from the issue that asked for batches; missed
ones are marked.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from artifacts.hardware.machines import machine
from moectl.bundled import demo_model
from profilers.text.corpus import documents
from runtime.control.counters import Counter
from runtime.links.emulated import EmulatedLink
from runtime.model.open import open_model
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.sampling import Sampling
from runtime.session.probe import Rates, scaled_rates
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tools.arguments import parser_of
from tools.bench.performance import Section, Table, publish

MACHINE = "rtx3090-pcie4"
BUDGET = "25%"
SHARED = "near, qstar"  # misses are shared between link and near tier
PRESETS = ("on-demand", "horizon", "near", SHARED)
FASTER = {64: 5.0, 256: 12.0}  # aims: tokens a second over one at a time
# a step over the longer of link and compute; its bytes over the bytes of its distinct experts
OVER_BOUND = 1.15
OVER_DISTINCT = 1.1
_ONE_BY_ONE = 8  # requests
_THEIRS = 64  # requests at a time up to which transformers' batch is measured: more take minutes
_PROBES = 20  # of the speed that link and near tier are scaled to; the fastest is undisturbed


class CpuClock:
    """Clock of the CPU seconds of this process, plus the seconds that it would have waited."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        return time.process_time() + self._waited_s

    def wait_until(self, deadline_s: float) -> None:
        self._waited_s += max(0.0, deadline_s - self.now_s())


@dataclass(frozen=True, slots=True)
class Way:
    """Medians of the steps of one run: seconds, bytes moved and bytes of the distinct experts; and
    the tokens per second of the run, prompts included. `rate`: of the link, bytes per second."""

    tokens_per_s: float
    step_s: float = 0.0
    nbytes: float = 0.0
    distinct_nbytes: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of one round with the same number of requests at a time: presets, everything resident,
    transformers' batch."""

    by_preset: dict[str, Way]
    resident: Way
    theirs: Way | None


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    rounds = []
    for _ in range(options.rounds):
        alone = {preset: _alone(preset, options) for preset in options.presets}
        rounds.append((alone, {rows: _round(rows, options) for rows in options.rows}))
    section = Section("batches", [_table(rounds, options)])
    command = " ".join(["python -m tools.bench.serving.batches", *sys.argv[1:]])
    publish(section, options.write, command)
    return 0


def _round(rows: int, options: argparse.Namespace) -> Rows:
    by_preset = {preset: _together(rows, options, preset=preset) for preset in options.presets}
    resident = _together(rows, options, preset="full", budget="100%")
    return Rows(by_preset, resident, _theirs(rows, options) if rows <= _THEIRS else None)


def _open(
    options: argparse.Namespace, *, preset: str, budget: str = BUDGET
) -> tuple[Session, CpuClock]:
    rates = _rates(options.experts)
    link, near = (f"{rate:.0f}B/s" for rate in (rates.link, rates.near))
    policies = {}
    if preset == SHARED:
        preset = "near"
        policies = {"miss": f"qstar:ratio={rates.link / rates.near:.4f}"}
    settings = Settings(
        preset=preset,
        policies=policies,
        budget=budget,
        threads=1,
        link=link,
        near=near,
        experts=options.experts,
    )
    session = Session.open(str(demo_model()), settings)
    clock = CpuClock()
    assert isinstance(session.parts.tiers.link, EmulatedLink)
    session.parts.tiers.link.clock = session.parts.tiers.near.clock = clock
    return session, clock


@cache
def _rates(experts: str) -> Rates:
    """Link and near tier in the proportions of the machine, the same for all that is measured."""
    opened = open_model(str(demo_model()), device="cpu")
    found = (
        scaled_rates(opened, machine(MACHINE), is_fused=experts == FUSED) for _ in range(_PROBES)
    )
    return max(found, key=lambda rates: rates.link)


def prompts(session: Session, count: int) -> Iterator[torch.Tensor]:
    """Prompts of 20 to 60 tokens from text that the model was not trained on."""
    rng = np.random.default_rng(0)
    ids = [
        session.encode(found.text[:400])[:, :60]
        for found in islice(documents("builtin:held-out"), 400)
    ]
    long = [each for each in ids if each.shape[1] == 60]
    for _ in range(count):
        yield long[rng.integers(len(long))][:, : rng.integers(20, 61)]


def _sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(max_new_tokens=options.tokens, ignore_eos=True)


def _alone(preset: str, options: argparse.Namespace) -> float:
    """Tokens a second of requests one after the other, as `moectl run` answers them."""
    session, clock = _open(options, preset=preset)
    with session:
        first, *asked = prompts(session, 1 + _ONE_BY_ONE)
        # what is compiled or loaded once does not count
        list(session.generate(first, _sampling(options)))
        begin_s = clock.now_s()
        for prompt in asked:
            assert len(list(session.generate(prompt, _sampling(options)))) == options.tokens
        return _ONE_BY_ONE * options.tokens / (clock.now_s() - begin_s)


def _together(rows: int, options: argparse.Namespace, *, preset: str, budget: str = BUDGET) -> Way:
    session, clock = _open(options, preset=preset, budget=budget)
    with session:
        asked = list(prompts(session, rows))
        steps = []
        with RequestBatch(session, rows=rows) as batch:
            begin_s = clock.now_s()
            for prompt in asked:
                batch.add(prompt, _sampling(options))
            while not batch.is_idle:
                first_pass = session.num_passes
                step_s = clock.now_s()
                results = batch.step()
                if len(results) == rows and all(result.token_id is not None for result in results):
                    counted = session.controller.counters.sum(first_pass=first_pass).sum(axis=1)
                    steps.append((clock.now_s() - step_s, *counted[_COUNTED]))
            seconds = clock.now_s() - begin_s
        step_s, demand, prefetched, wanted = np.median(np.array(steps[1:]), axis=0).tolist()
        return Way(
            rows * options.tokens / seconds,
            step_s,
            demand + prefetched,
            wanted * session.opened.shape.expert_nbytes,
            session.parts.tiers.bandwidth,
        )


_COUNTED = [Counter.DEMAND_BYTES, Counter.PREFETCH_BYTES, Counter.REQUESTS]


def _theirs(rows: int, options: argparse.Namespace) -> Way:
    """transformers' continuous batching of the same session, on demand."""
    session, clock = _open(options, preset="on-demand")
    with session:
        asked = [prompt[0].tolist() for prompt in prompts(session, rows)]
        wanted = GenerationConfig(
            max_new_tokens=options.tokens, do_sample=False, eos_token_id=-1, pad_token_id=1
        )
        room = ContinuousBatchingConfig(num_blocks=max(64, rows), max_batch_tokens=512)
        begin_s = clock.now_s()
        found = session.opened.model.generate_batch(
            asked, generation_config=wanted, continuous_batching_config=room, progress_bar=False
        )
        assert sum(len(one.generated_tokens) for one in found.values()) == rows * options.tokens
        return Way(rows * options.tokens / (clock.now_s() - begin_s))


def _table(
    rounds: list[tuple[dict[str, float], dict[int, Rows]]], options: argparse.Namespace
) -> Table:
    rows = []
    for count in options.rows:
        for preset in options.presets:
            of = [(alone[preset], at[count].by_preset[preset], at[count]) for alone, at in rounds]
            rows.append((count, preset, *_cells(count, of)))
    columns = (
        "at a time",
        "preset",
        "tokens/s",
        "over one at a time",
        "over transformers' batch",
        "step, ms",
        "of it the link, ms",
        "compute, ms",
        "step over the longer",
        "bytes over those of its experts",
    )
    note = (
        f"medians of {options.rounds} rounds; {options.tokens} greedy tokens after prompts of 20 "
        f"to 60, the bundled toy model at {BUDGET} over a link in the proportions of {MACHINE}, "
        f"experts {options.experts}; time is CPU time plus waiting for the emulated link; bold "
        "misses an aim"
    )
    return Table("Requests at a time", columns, rows, note)


def _cells(count: int, of: list[tuple[float, Way, Rows]]) -> Iterator[str]:
    faster = median(way.tokens_per_s / alone for alone, way, _ in of)
    link_s = median(way.nbytes / way.rate for _, way, _ in of)
    compute_s = median(at.resident.step_s for _, _, at in of)
    over = median(way.step_s / max(way.nbytes / way.rate, at.resident.step_s) for _, way, at in of)
    moved = median(way.nbytes / way.distinct_nbytes for _, way, _ in of)
    yield f"{median(way.tokens_per_s for _, way, _ in of):.0f}"
    yield _marked(f"{faster:.1f}", missed=faster < FASTER.get(count, 0.0))
    theirs = [way.tokens_per_s / at.theirs.tokens_per_s for _, way, at in of if at.theirs]
    yield f"{median(theirs):.1f}" if theirs else ""
    yield f"{1e3 * median(way.step_s for _, way, _ in of):.1f}"
    yield f"{1e3 * link_s:.1f}"
    yield f"{1e3 * compute_s:.1f}"
    yield _marked(f"{over:.2f}", missed=over > OVER_BOUND and count > 1)
    yield _marked(f"{moved:.2f}", missed=moved > OVER_DISTINCT)


def _marked(text: str, *, missed: bool) -> str:
    return f"**{text}**" if missed else text


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        rows=([1, 16, 64, 256], "requests at a time"),
        tokens=(24, "of each answer"),
        rounds=3,
        write=(Path, "put the table into this page"),
    )
    parser.add_argument("--presets", type=lambda text: text.split("+"), default=list(PRESETS))
    parser.add_argument("--experts", choices=("exact", "fused"), default="exact")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
