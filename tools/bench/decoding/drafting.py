"""Decoding with drafts beside decoding without, in pairs: the bundled model on its held-out code
and on text that repeats itself.

    moectl quantize --store DIR/moe.duckdb
    OMP_NUM_THREADS=1 python -m tools.bench.decoding.drafting --store DIR/moe.duckdb
    python -m tools.bench.decoding.drafting --requests 4       which share passes
    OMP_NUM_THREADS=1 python -m tools.bench.decoding.drafting --store DIR/moe.duckdb \
        --presets all --drafters auto

Sessions of one placement take turns on one prompt, on one thread; a ratio is of tokens a second to
those of `none` in the same round, its spread the quartiles. Without --store no placement has
replicas beside its slots. With --presets the placements are those presets as they are; one that
cannot run here has the reason in its row. Seconds are the processor's, measured, and those of the bytes loaded on
demand at the rate of the emulated link, calculated: what else runs beside changes neither much.

First figures, three rounds of 96 tokens beside seven other jobs on 2 cores of a Xeon with AVX-512,
64MB/s, seed 0 (round by round, not the median): repeated text, on-demand: `ngram:4` 1.67, 1.25 and
1.81 (0.58 of drafts accepted), `auto` 1.23, 1.97 and 1.83 (0.87; it learns in the first); code,
on-demand with shadows of 1 bit: `resident:3` 0.93 and 0.87 (0.96; 3.4 tokens a verification, but
a draft takes the processor as long as a token), `auto` 0.96 and 0.90 before it knew what drafts
of each drafter cost.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from artifacts.errors import Problem
from moectl.bundled import demo_model
from runtime.policies.presets import presets
from runtime.session.generation.round_robin import answer_all
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.arguments import parser_of
from tools.bench.measuring import in_turns
from tools.make.demo_text import source_code

DRAFTERS = ["ngram:4", "resident:2", "resident:4", "auto"]
PLACEMENTS: Mapping[str, Settings] = {
    "on-demand": Settings("on-demand"),
    "on-demand, shadows": Settings("on-demand", {"residency": "shadow:bits=1"}),
}
_REPEATED = "def add_{n}(first, second):\n    return first + second\n\n\n"
CHARACTERS = 900  # of a prompt


def prompts(requests: int) -> dict[str, list[str]]:
    """Return the prompts of so many requests by kind of text."""
    code = [one.text[:CHARACTERS] for one in islice(source_code(held_out=True), 2, 2 + requests)]
    return {"code": code, "repeated": [_REPEATED.format(n=n + 1) * 12 for n in range(requests)]}


def rows(
    placements: Mapping[str, Settings],
    drafters: list[str],
    *,
    store: Path | None,
    rounds: int,
    tokens: int,
    requests: int,
) -> Iterator[str]:
    """Yield a row of the table for each placement, text and drafter."""
    sampling = Sampling(tokens, ignore_eos=True)
    ways = ["none", *drafters]
    for placement, settings in placements.items():
        for kind, texts in prompts(requests).items():
            with ExitStack() as stack:
                try:
                    sessions = [
                        stack.enter_context(
                            Session.open(demo_model(), replace(settings, draft=way), store=store)
                        )
                        for way in ways
                    ]
                except Problem as problem:
                    yield f"| {placement} | {kind} | {problem} | | | | |"
                    continue
                seconds = np.zeros((rounds + 1, len(ways)))
                for turn, way in in_turns(range(len(ways)), rounds + 1):
                    seconds[turn, way] = seconds_of(sessions[way], texts, sampling)
                ratios = seconds[1:, :1] / seconds[1:]  # the first round warms up
                for name, session, own in zip(ways[1:], sessions[1:], ratios.T[1:], strict=True):
                    yield _row(placement, kind, name, session.receipt()["draft"], own)


def seconds_of(session: Session, texts: list[str], sampling: Sampling) -> float:
    """Return the processor's seconds of an answer, and those of the bytes that it loads on
    demand."""
    first_pass = session.num_passes
    begin_s = time.process_time()
    if len(texts) > 1:
        answer_all(session, texts, sampling)
    else:
        session.generate(texts[0], sampling)
    taken_s = time.process_time() - begin_s
    counters = session.effort(first_pass=first_pass).counters
    return taken_s + counters["demand_bytes"] / session.parts.tiers.bandwidth


def _row(
    placement: str, kind: str, name: str, said: Mapping[str, object], ratios: np.ndarray
) -> str:
    low, high = np.quantile(ratios, (0.25, 0.75))
    share = said["accepted"] / said["drafted"] if said["drafted"] else 0.0
    drafted = [one for of in said["measured"].values() for k, one in of.items() if k != "0"]
    passes = sum(one["passes"] for one in drafted)
    tokens = sum(one["tokens_per_pass"] * one["passes"] for one in drafted) / (passes or 1)
    return (
        f"| {placement} | {kind} | `{name}` | {share:.2f} | {tokens:.2f} "
        f"| {np.median(ratios):.2f} | {low:.2f} to {high:.2f} |"
    )


def main() -> None:
    options = {"store": str, "link": "64MB/s", "budget": "25%", "experts": "exact"}
    parser = parser_of(__doc__, **options, rounds=5, tokens=96, requests=1, drafters=DRAFTERS)
    parser.add_argument("--presets", nargs="+", default=[], help="names, or all")
    given = parser.parse_args()
    store = Path(given.store) if given.store else None
    placements = dict(PLACEMENTS) if store else {"on-demand": PLACEMENTS["on-demand"]}
    if given.presets:
        names = list(presets()) if given.presets == ["all"] else given.presets
        placements = {name: Settings(name) for name in names}
    shared = {name: getattr(given, name) for name in ("link", "budget", "experts")}
    placements = {
        name: replace(settings, threads=1, **shared) for name, settings in placements.items()
    }
    print("| placement | text | drafter | accepted | tokens a verification | speed | quartiles |")
    print("|---|---|---|---:|---:|---:|---:|")
    sizes = {name: getattr(given, name) for name in ("rounds", "tokens", "requests")}
    for row in rows(placements, given.drafters, store=store, **sizes):
        print(row, flush=True)


if __name__ == "__main__":
    main()
