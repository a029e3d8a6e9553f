"""Losses of presets on the built-in task, item by item beside the full model.

    moectl profile && moectl build-buddies && moectl quantize
    python -m tools.bench.quality.accuracy --store moe.duckdb [--model FOLDER] --write docs/lab/evaluate.md

All presets answer the same items, so that the error of a difference comes only from items on which
two presets differ. `context-aware` stands beside itself without its selector of bit-widths (Table 3
of *Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems*). Each way of substituting stands
beside random experts under the same gates.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.stores import stored_artefacts
from profilers.compare import continuations
from profilers.compare.tasks import Tasks, evaluated, load_tasks
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tools.arguments import parser_of
from tools.bench.performance import Section, Table, publish


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset at a budget, with policies of its own; `beside` names the label of the row it is
    held against."""

    label: str
    preset: str
    budget: str
    policies: dict[str, str] = field(default_factory=dict)
    beside: str = "full"


def _without_selector(bits: int, budget: str) -> Iterator[Preset]:
    for label, chosen in (("", "prefix"), (", without its selector", "uniform")):
        placed = {"residency": f"hot:avg_bits={bits},bits={chosen},migrate=before"}
        yield Preset(f"context-aware, {bits} bits{label}", "context-aware", budget, placed)


PRESETS = (
    Preset("full", "full", "100%"),
    *(
        one
        for budget in ("50%", "12.5%")
        for bits in (3, 2)
        for one in _without_selector(bits, budget)
    ),
    Preset("shadow", "shadow", "12.5%"),
    Preset("buddymoe", "buddymoe", "25%"),
    Preset("buddymoe-random", "buddymoe-random", "25%", beside="buddymoe"),
    Preset("buddymoe, every rank", "buddymoe", "25%", {"miss": "buddy"}),
    Preset(
        "random, every rank",
        "buddymoe",
        "25%",
        {"miss": "buddy:stand_in=random_resident"},
        "buddymoe, every rank",
    ),
    Preset("importance", "importance", "25%"),
)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    opened = open_quietly(options.model or str(demo_model()))
    artefacts = stored_artefacts(options.store, opened)
    continuations.COUNT = options.items
    tasks = load_tasks([continuations.NAME])
    answers = {(one.label, one.budget): _answers(one, opened, artefacts, tasks) for one in PRESETS}
    table = _table(answers, options.model)
    command = "python -m tools.bench.quality.accuracy"
    publish(Section("accuracy", [table]), options.write, command)


def _answers(one: Preset, opened: MoeModel, artefacts: Artefacts, tasks: Tasks) -> np.ndarray:
    """Return whether each item was answered right, bool [N]."""
    settings = Settings(one.preset, budget=one.budget, policies=one.policies, experts=FUSED)
    with Session(opened, settings, artefacts=artefacts) as session:
        samples = evaluated(session, tasks, keeps_items=True)["samples"][continuations.NAME]
    return np.array([bool(one["acc"]) for one in sorted(samples, key=lambda one: one["doc_id"])])


def _table(answers: dict[tuple[str, str], np.ndarray], model: str | None) -> Table:
    rows = []
    by_label = {}
    for one in PRESETS:
        right = answers[one.label, one.budget]
        by_label[one.label] = right
        lost = _beside(right, by_label["full"]) if one.label != "full" else "-"
        less = _beside(right, by_label[one.beside]) if one.beside != "full" else "-"
        rows.append((one.label, one.budget, _share(right), lost, less))
    columns = (
        "preset",
        "budget",
        "accuracy",
        "less the full model's",
        "less that of the row it controls",
    )
    count = len(by_label["full"])
    note = (
        f"{count} items of four, chance .25; experts fused; +- is a standard error, of a "
        "difference that of the paired items"
    )
    return Table(f"{continuations.NAME}, {model or 'the bundled model'}", columns, rows, note)


def _share(right: np.ndarray) -> str:
    return f"{right.mean():.3f} +- {(right.var(ddof=1) / len(right)) ** 0.5:.3f}"


def _beside(right: np.ndarray, other: np.ndarray) -> str:
    difference = right.astype(float) - other
    return f"{difference.mean():+.3f} +- {(difference.var(ddof=1) / len(difference)) ** 0.5:.3f}"


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        model=str,
        items=continuations.COUNT,
        threads=1,
        write=(Path, "put the table into this page"),
    )
    parser.add_argument("--store", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
