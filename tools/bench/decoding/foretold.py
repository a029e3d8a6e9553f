"""What prefetching by drafts saves: `resident` drafts under several prefetch policies, in turns on
the bundled model's held-out code.

    OMP_NUM_THREADS=1 python -m tools.bench.decoding.foretold

Each round is another text, which all ways answer after one that warms them up. Counts are of whole
answers, prompts included, over their tokens; seconds are as in `tools.bench.decoding.drafting`:
those of bytes loaded on demand calculated, prefetched bytes left out, as they come beside compute.
"""

from contextlib import ExitStack
from itertools import islice

import numpy as np

from moectl.bundled import demo_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.arguments import parser_of
from tools.bench.decoding.drafting import CHARACTERS, seconds_of
from tools.bench.measuring import in_turns
from tools.make.demo_text import source_code

WAYS = ["on-demand", "on-demand next_gate", "on-demand draft", "horizon", "horizon draft"]
_COUNTED = ("misses", "demand_bytes", "prefetch_bytes", "wasted_bytes")


def _settings(way: str, options: dict[str, str]) -> Settings:
    preset, _, prefetch = way.partition(" ")
    return Settings(preset, {"prefetch": prefetch} if prefetch else {}, threads=1, **options)


def table(ways: list[str], options: dict[str, str], *, rounds: int, tokens: int) -> list[str]:
    """Return the rows: counts a token over all rounds, seconds over those of the first way."""
    sampling = Sampling(tokens, ignore_eos=True)
    texts = [one.text[:CHARACTERS] for one in islice(source_code(held_out=True), rounds + 1)]
    counts = np.zeros((len(ways), len(_COUNTED)))
    seconds = np.zeros((rounds + 1, len(ways)))
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(Session.open(demo_model(), _settings(way, options))) for way in ways
        ]
        for turn, way in in_turns(range(len(ways)), rounds + 1):
            first_pass = sessions[way].num_passes
            seconds[turn, way] = seconds_of(sessions[way], [texts[turn]], sampling)
            counted = sessions[way].effort(first_pass=first_pass).counters
            if turn:
                counts[way] += [counted[name] / tokens / rounds for name in _COUNTED]
        drafts = [session.receipt()["draft"] for session in sessions]
    ratios = seconds[1:] / seconds[1:, :1]
    return [
        f"| {way} | {said['accepted'] / said['drafted']:.2f} | {misses:.2f} | {demand / 1e3:.0f} "
        f"| {ahead / 1e3:.0f} | {wasted / 1e3:.0f} | {np.median(own):.2f} "
        f"| {np.quantile(own, 0.25):.2f} to {np.quantile(own, 0.75):.2f} |"
        for way, said, (misses, demand, ahead, wasted), own in zip(
            ways, drafts, counts.tolist(), ratios.T, strict=True
        )
    ]


def main() -> None:
    options = {
        "link": "64MB/s",
        "budget": "25%",
        "experts": "exact",
        "draft": "resident:4",
        "window": "96KiB",
    }
    given = parser_of(__doc__, **options, rounds=8, tokens=96, ways=WAYS).parse_args()
    settings = {name: getattr(given, name) for name in options}
    print(
        "| policies | accepted | misses | KB on demand | KB ahead | KB wasted | time | quartiles |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    print(*table(given.ways, settings, rounds=given.rounds, tokens=given.tokens), sep="\n")


if __name__ == "__main__":
    main()
