"""A token after a long prompt with keys and values in fewer bits, beside those as computed.

    python -m tools.make.checkpoint DIR --layers 2 --experts 16 --hidden 2048 --intermediate 1024
    python -m tools.bench.decoding.kv_caches --model DIR --prompt 4096 --rounds 6

Caches take turns on one prompt, a few tokens each, on one thread; times are processor time, ratios
to `auto` of the same experts are taken within a round. Without --model the bundled one is measured.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from moectl.bundled import demo_model
from runtime.session.generation.sampling import Sampling
from runtime.session.generation.single import Generation
from runtime.session.session import Session
from runtime.session.settings import Settings
from tools.arguments import parser_of
from tools.bench.measuring import in_turns

CACHES = ("auto", "int8", "int4")


def rows(model: Path, *, prompt: int, rounds: int, tokens: int) -> Iterator[str]:
    """Yield a row of a table for each kind of experts and cache."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (1, prompt)))
    sampling = Sampling((rounds + 1) * tokens + 1, ignore_eos=True)
    for experts in ("exact", "fused"):
        with ExitStack() as stack:
            ways: list[tuple[Session, Generation]] = []
            for cache in CACHES:
                options = {"experts": experts, "kv_cache_dtype": cache, "threads": 1}
                settings = Settings("on-demand", budget="100%", **options)
                session = stack.enter_context(Session.open(model, settings))
                ways.append((session, session.begin(ids, sampling)))
                session.step(ways[-1][1])  # which reads the prompt
            taken = np.zeros((rounds + 1, len(ways)))
            for turn, way in in_turns(range(len(ways)), rounds + 1):
                session, generation = ways[way]
                begin_s = time.process_time()
                for _ in range(tokens):
                    session.step(generation)
                taken[turn, way] = (time.process_time() - begin_s) / tokens * 1e3
        ratios = taken[1:] / taken[1:, :1]  # the first round warms up
        for cache, ms, ratio in zip(CACHES, taken[1:].T, ratios.T, strict=True):
            low, high = np.quantile(ratio, (0.25, 0.75))
            yield (
                f"| {experts} | `{cache}` | {np.median(ms):.1f} | {np.median(ratio):.2f} "
                f"| {low:.2f} to {high:.2f} |"
            )


def main() -> None:
    options = {"prompt": 512, "rounds": 6, "tokens": 4, "model": demo_model()}
    given = parser_of(__doc__, **options).parse_args()
    print("| experts | cache | ms a token | ratio | quartiles |\n|---|---|---:|---:|---:|")
    for row in rows(given.model, prompt=given.prompt, rounds=given.rounds, tokens=given.tokens):
        print(row, flush=True)


if __name__ == "__main__":
    main()
