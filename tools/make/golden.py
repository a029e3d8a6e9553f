"""Counts what every policy does on the checked-in trace, and writes the golden file that the tests
compare with.

    python -m tools.make.golden                rewrite tests/data/golden.json for the whole table of policies
    python -m tools.make.golden eviction/lru   only this row; the others stay as they are

A row that changes without a reason that you can name is a bug.
"""

import json
import sys

from artifacts.common.files import replacing
from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace
from runtime.policies import POLICIES
from runtime.policies.miss.buddy import STAND_INS
from runtime.policies.presets import Scope
from runtime.replay.from_trace import maps
from tests.runtime.policies.contract import Case, run
from tools import DATA, TRACE

GOLDEN = DATA / "golden.json"
SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=160)
NUM_MAPS = 200  # of the requests that are not replayed
SLOTS = (
    16,
    32,
    48,
    64,
    96,
    128,
    192,
    240,
)  # of 256; the first two are fewer than one token wants, or just as many
QUARTER = (64,)  # for the other axes, which run over lru
REQUESTS = 2
VARIANTS = (
    *(f"miss/buddy:quota=0.2,stand_in={name}" for name in STAND_INS),
    "miss/buddy:keep=0.5",
    "miss/buddy:metric=coactivation,rho=3,over=token",
    "miss/buddy:percentile=50,temperature=0.8",
    "miss/fetch_priority:drop=30",
)
COUNTERS = (
    "hits",
    "late",
    "misses",
    "evictions",
    "collisions",
    "replaced_ranks",
    "dropped_ranks",
    "demand_bytes",
    "prefetch_bytes",
)

Row = dict[str, list[list[int]]]  # by scope, for each number of slots the counters


def every_row() -> list[str]:
    """`axis/policy` of the whole table, and the variants that have counts of their own."""
    return [f"{axis}/{name}" for axis, table in POLICIES.items() for name in table] + list(VARIANTS)


def count(row: str) -> Row:
    """Replay the trace by one policy, the other axes plain."""
    axis, name = row.split("/")
    recorded = read_parquet(TRACE, num_experts=SHAPE.num_experts)
    trace = recorded.take(recorded.request < REQUESTS)
    others = recorded.take(recorded.request >= REQUESTS)
    slots = SLOTS if axis == "eviction" else QUARTER
    return {
        scope: [
            _count(Case(SHAPE, trace, n, scope, 2 * SHAPE.expert_nbytes), axis, name, others)
            for n in slots
        ]
        for scope in Scope
    }


def _count(case: Case, axis: str, name: str, others: Trace) -> list[int]:
    found = maps(others, case.shape, capacity=NUM_MAPS) if name == "map" else None
    totals = run(case, maps=found, **{axis: name}).counters.totals()
    return [totals[counter] for counter in COUNTERS]


def main() -> None:
    kept = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    asked = sys.argv[1:] or every_row()
    rows = {
        row: count(row) if row in asked else kept[row]
        for row in every_row()
        if row in asked or row in kept
    }
    lines = [f" {json.dumps(row)}: {json.dumps(counts)}" for row, counts in rows.items()]
    with replacing(GOLDEN) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{GOLDEN.name}: {len(rows)} rows, {', '.join(asked)} counted anew")


if __name__ == "__main__":
    main()
