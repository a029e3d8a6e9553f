"""Items of a task scored in batches beside one at a time: how many more a second, and by how much
the answers differ.

    OMP_NUM_THREADS=1 python -m tools.bench.quality.task_batches --write docs/evaluate.md

Batches take turns in rounds, so that what else the machine does falls on all alike. The items are
those of the built-in task; a likelihood is compared per token of the continuation.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from profilers.compare.continuations import CHOICES, items
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings
from tools.arguments import parser_of
from tools.bench.performance import Ratio, Section, Table, publish

BATCHES = (1, 4, 16, 64)
SETTINGS = {
    "full": {"preset": "full"},
    "on-demand at 25 %, link of an RTX 3090": {"budget": "25%", "scaled_to": "rtx3090-pcie4"},
    "on-demand at 25 % over 100 MB/s": {"budget": "25%", "link": "100MB/s"},
}


@dataclass(slots=True)
class Found:
    """One batch of one setting: seconds of each round, the answers and the bytes that were
    moved."""

    seconds: list[float]
    log_p: np.ndarray  # [items, choices]
    nbytes: int


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    opened = open_quietly(options.model or str(demo_model()))
    tables = [
        _table(opened, name, _measured(opened, given, options), options)
        for name, given in SETTINGS.items()
    ]
    command = "python -m tools.bench.quality.task_batches"
    publish(Section("task-batches", tables), options.write, command)


def _measured(
    opened: MoeModel, given: Mapping[str, str], options: argparse.Namespace
) -> dict[int, Found]:
    found: dict[int, Found] = {}
    for _ in range(options.rounds):
        for batch in BATCHES:
            seconds, log_p, nbytes = score(opened, given, batch, options.items)
            found.setdefault(batch, Found([], log_p, nbytes)).seconds.append(seconds)
    return found


def score(
    opened: MoeModel, given: Mapping[str, str], batch: int, count: int
) -> tuple[float, np.ndarray, int]:
    """Return the seconds that scoring took, the log probability of each choice per token, and the
    bytes moved."""
    from lm_eval.api.instance import Instance

    from profilers.compare.lm_eval_model import SessionLM

    asked = [(passage, one["text"]) for one in items(count) for passage in one["passages"]]
    requests = [Instance("loglikelihood", {}, args, place) for place, args in enumerate(asked)]
    lengths = [len(opened.tokenizer.encode(text)) for _, text in asked]
    with Session(opened, Settings(**given)) as session:
        model = SessionLM(session, batch_size=batch)
        model.loglikelihood(requests[:CHOICES], disable_tqdm=True)
        begin_s = time.perf_counter()
        answers = model.loglikelihood(requests, disable_tqdm=True)
        seconds = time.perf_counter() - begin_s
        counters = session.controller.counters.totals()
    log_p = np.array([answer for answer, _ in answers]) / lengths
    return (
        seconds,
        log_p.reshape(-1, CHOICES),
        counters["demand_bytes"] + counters["prefetch_bytes"],
    )


def _table(
    opened: MoeModel, name: str, found: Mapping[int, Found], options: argparse.Namespace
) -> Table:
    alone = found[1]
    rows = []
    for batch, one in found.items():
        apart = np.abs(one.log_p - alone.log_p)
        others = (one.log_p.argmax(axis=1) != alone.log_p.argmax(axis=1)).sum()
        ratio = Ratio.of(alone.seconds, one.seconds)
        differences = f"{np.median(apart):.2g}", f"{apart.max():.2g}", others
        rows.append((batch, *ratio.cells(), f"{one.nbytes / alone.nbytes:.3f}", *differences))
    speed = ("items a second, one at a time = 1", "quartiles")
    apart = ("log p a token apart, median", "largest")
    columns = ("batch", *speed, "bytes moved", *apart, "other choices")
    note = (
        f"{options.items} items of {CHOICES} choices in {opened.expert_format}, {options.rounds} "
        "rounds; one thread"
    )
    return Table(name, columns, rows, note)


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__, model=str, items=60, rounds=3, write=(Path, "put the tables into this page")
    ).parse_args()


if __name__ == "__main__":
    main()
