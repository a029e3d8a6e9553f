"""A process with moectl as it is installed and nothing of the repository on its path, which runs
commands of a user.

`python -I stranger.py SCRATCH` reads an order a line, as JSON: the arguments of `moectl`, the
folder to stand in, the file for what it prints and the one for what it says. It answers with two
lines: the process id of the command, and its exit code. A command is a fork of this process, which
has imported all commands already, and compiled what most of them run.
"""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO


def quickly(scratch: Path) -> None:
    """Make the commands that measure measure little, and cut the bundled traces to 40 tokens
    of their first request."""
    from pyarrow import compute, parquet

    from moectl.bundled import bundled_trace
    from moectl.commands.start import demo
    from moectl.commands.start.doctor import measured
    from moectl.shared import trace_source
    from profilers.compare import check_prediction, continuations
    from profilers.hardware import load_times

    little = load_times.TimingEffort(lengths=(16,), turns=3)
    load_times.THOROUGH = little
    measured.QUICK = little
    check_prediction._TIMES = 1
    demo._NUM_SEQUENCES = 1
    demo._DECODE = 8
    demo._PROBES = 2
    demo._CALIBRATION = {"samples": 4, "length": 64}
    continuations.COUNT = 3

    def first_request(name: Path) -> Path | None:
        if (whole := bundled_trace(name)) is None:
            return None
        rows = parquet.read_table(whole)
        rows = rows.filter(compute.equal(rows["request"], rows["request"][0]))
        first = scratch / f"{name}-{os.getpid()}.parquet"
        parquet.write_table(rows.filter(compute.less(rows["pass"], 40)), first)
        return first

    trace_source.bundled_trace = first_request


def few_averages() -> None:
    """Have `inspect precision` measure little too. It comes from the clone, whose folder is on the
    path from here on."""
    from moectl.shared.importing import of_clone

    of_clone("tools.lab.price_precision", "inspect precision").AVERAGES = (2.0,)


WARMING = (
    "run --prompt a --greedy --max-new-tokens 2",
    "bench --simulate --presets specmd --budgets 25% --tokens 16 --length 16 --store warm.duckdb",
)


def warm_up(scratch: Path) -> None:
    """Import and compile once what each fork would."""
    import moectl.commands

    for found in pkgutil.walk_packages(moectl.commands.__path__, "moectl.commands."):
        try:
            command = importlib.import_module(found.name)
        except ModuleNotFoundError:  # of an extra that is not installed, as Ray Serve
            continue
        for node in ast.walk(ast.parse(inspect.getsource(command))):
            if isinstance(node, ast.ImportFrom):
                with suppress(ImportError):  # of an extra that is not installed
                    importlib.import_module(node.module)
    for line in WARMING:
        run(
            {
                "arguments": line.split(),
                "folder": str(scratch),
                "out": os.devnull,
                "err": os.devnull,
            }
        )


def begin(order: dict) -> int:
    """Start the command of an order. Return the id of its process."""
    if pid := os.fork():
        return pid
    code = 70  # of a command that ends in an error which is not moectl's
    try:
        code = run(order)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(order: dict) -> int:
    """Run a command in this process, with its streams in files. Return its exit code."""
    from moectl.cli import main

    if order["arguments"][:2] == ["inspect", "precision"]:
        few_averages()
    os.chdir(order["folder"])
    os.environ["XDG_DATA_HOME"] = f"{order['folder']}/.data"  # the reader of another page has none
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  # the orders are read from the former one
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    return main(order["arguments"])


def serve_orders(orders: IO[str], answers: IO[str]) -> None:
    """Run the orders one by one."""
    for line in orders:
        pid = begin(json.loads(line))
        print(pid, file=answers, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    scratch = Path(sys.argv[1])
    orders = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    quickly(scratch)
    warm_up(scratch)
    serve_orders(orders, answers)
