"""Decoding with every expert resident on several threads: moectl's fused experts beside llama.cpp.

A section of tools.bench.decode. All take turns in one process; ratios are taken within a round.
"""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from profilers.compare.llama_cpp import LlamaCpp
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tools.bench.decoding.resident import (
    PROMPT,
    Contender,
    decode_by_llama_cpp,
    decode_seconds,
    exported,
    run_rounds,
)
from tools.bench.performance import Ratio, Section, Table

COUNTS = (1, 2, 4, 8)


def measure(name: str, folder: Path, *, rounds: int, tokens: int) -> Section:
    """Return a section of one table, in bfloat16, with up to as many threads as there are cores."""
    return Section("threads", [table(name, folder, rounds=rounds, tokens=tokens)])


def table(name: str, folder: Path, *, rounds: int, tokens: int) -> Table:
    """A row for each number of threads; llama.cpp's cells are empty where it is not installed."""
    counts = [count for count in COUNTS if count <= (os.cpu_count() or 1)]
    with ExitStack() as stack:
        opened = open_model(str(folder), dtype=torch.bfloat16)
        vocab_size = opened.model.config.vocab_size
        ids = torch.from_numpy(
            np.random.default_rng(0).integers(3, vocab_size, (1, PROMPT + tokens))
        )
        contenders = []
        for count in counts:
            settings = Settings("full", experts=FUSED, threads=count)
            session = stack.enter_context(
                Session(open_model(str(folder), dtype=torch.bfloat16), settings)
            )
            contenders.append(
                Contender(f"moectl {count}", partial(decode_seconds, session.opened.model))
            )
        if file := exported(stack, opened, folder, "bf16"):
            for count in counts:
                llama = LlamaCpp(
                    file, threads=count, num_tokens=ids.shape[1], vocab_size=vocab_size
                )
                contenders.append(
                    Contender(f"llama.cpp {count}", partial(decode_by_llama_cpp, llama))
                )
        seconds = run_rounds(contenders, ids, rounds=rounds)
    return _table(name, counts, seconds, rounds=rounds, tokens=tokens)


def _table(
    name: str, counts: list[int], seconds: dict[str, list[float]], *, rounds: int, tokens: int
) -> Table:
    rows = []
    ratios = {}
    for count in counts:
        own = seconds[f"moectl {count}"]
        theirs = seconds.get(f"llama.cpp {count}")
        beside = Ratio.of(own, theirs) if theirs else None
        over_one = Ratio.of(own, seconds["moectl 1"]).median
        cells = (f"{median(theirs) * 1e3:.2f}", *beside.cells()) if beside else ("", "", "")
        rows.append((count, f"{median(own) * 1e3:.2f}", f"{over_one:.2f}", *cells))
        if beside:
            ratios[f"{name}, {count} threads"] = beside
    columns = (
        "threads",
        "moectl, ms/token",
        "over one thread",
        "llama.cpp, ms/token",
        "ratio",
        "quartiles of the ratio",
    )
    note = (
        f"experts fused; medians over {rounds} rounds of {tokens} tokens; each round begins with "
        "another"
    )
    return Table(f"{name}, bfloat16", columns, rows, note, ratios)
