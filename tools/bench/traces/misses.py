"""What becomes of a miss, on machines by their data sheets: virtual time and counts on traces of
real models.

    python -m tools.bench.traces.misses --traces FOLDER --write docs/lab/traces.md

Each cell has milliseconds of a decoded token on virtual time, then shares of all requests: hits,
computed near, loaded and waited for, and behind, loaded without a step that waits. The
traces hold neither prompts nor predictions: nothing is prefetched, and the cache begins empty.
"""

import argparse
from pathlib import Path

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS
from artifacts.traces.parquet import read_parquet
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tools.bench.performance import Table
from tools.bench.traces.real import RealTrace, first_passes, options, present, tabulate

MODEL_OF = {
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-20b-mmlu": "gpt-oss-20b",
    "gpt-oss-20b-gpqa": "gpt-oss-20b",
    "gpt-oss-20b-mmlupro": "gpt-oss-20b",
    "mixtral-8x7b": "mixtral-8x7b",
}
MISSES = ("fetch", "near", "qstar:ratio={}", "behind")
EVICTIONS = (("lru", "layer"), ("late_horizon", "layer"), ("horizon", "global"))


def main() -> None:
    parser = options(
        __doc__,
        machines=(["rtx3060-12gb", "rtx4090", "h100-16cores"], "by name"),
        budget=("25%", "of the experts"),
    )
    parser.set_defaults(tokens=1000)
    chosen = parser.parse_args()
    found = [(real, path) for real, path in present(chosen) if real.name in MODEL_OF]
    command = f"python -m tools.bench.traces.misses --traces FOLDER --tokens {chosen.tokens}"
    tabulate(chosen, found, lambda *one: [measured(*one, chosen)], command, "-misses")


def measured(real: RealTrace, path: Path, chosen: argparse.Namespace) -> Table:
    """Replay every miss policy over every eviction on every machine; return the table."""
    trace = first_passes(
        read_parquet(path, num_experts=real.num_experts), chosen.tokens, apart=real.apart
    )
    model = MODELS[MODEL_OF[real.name]]
    workloads = [Workload(trace, model, machine(name)) for name in chosen.machines]
    rows = [
        (
            f"`{miss.partition(':')[0]}`",
            f"`{eviction}`, {scope}",
            *(cell(one, miss, eviction, scope, chosen.budget) for one in workloads),
        )
        for miss in MISSES
        for eviction, scope in EVICTIONS
        if miss != "near" or eviction == "lru"  # it evicts nothing
    ]
    machines = [f"`{one.machine.name}`" for one in workloads]
    note = f"{workloads[0].num_tokens:,} tokens of {model.name}, a budget of {chosen.budget}"
    return Table(f"{real.told}: misses", ("miss", "eviction", *machines), rows, note)


def cell(workload: Workload, miss: str, eviction: str, scope: str, budget: str) -> str:
    named = workload.machine
    policies = {"miss": miss.format(f"{named.link_gbps / named.near_gbps:.3g}")}
    policies["eviction"] = eviction
    outcome = workload.run(Setting(miss, policies=policies, scope=scope, budget=budget))
    counts = outcome.counters
    shares = [
        counts[name] / counts["requests"] for name in ("hits", "near", "fetched", "prefetches")
    ]
    return f"{outcome.times['tpot_ms']:.2f} ({', '.join(f'{share:.2f}' for share in shares)})"


if __name__ == "__main__":
    main()
