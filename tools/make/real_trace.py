"""Cuts the bundled trace of gpt-oss-20b out of traces of real requests.

    python -m tools.make.real_trace moectl/traces/gpt-oss-20b.parquet gpqa.parquet mmlu.parquet

The cut has the first `TOKENS` decoded tokens of each of the first `REQUESTS` requests of each
trace. Experts are exact; weights are rounded to `MANTISSA_BITS` bits, as many as bfloat16 has, so
that the file stays small. moectl/traces/README.md says where the traces come from.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import Trace, concatenate
from tools.make.demo_trace import shortened, write

REQUESTS = 8
TOKENS = 160
MANTISSA_BITS = 7


def beginnings(trace: Trace) -> Trace:
    """The beginning of each of the first requests; passes keep their order."""
    first = trace.take(np.flatnonzero(np.isin(trace.request, np.unique(trace.request)[:REQUESTS])))
    begins = {
        number: first.token[first.request == number].min()
        for number in np.unique(first.request).tolist()
    }
    at = first.token - np.array([begins[number] for number in first.request.tolist()])
    return first.take(np.flatnonzero(at < TOKENS))


def joined(parts: list[Trace]) -> Trace:
    """The parts one after the other, requests and passes numbered on."""
    request = pass_ = 0
    numbered = []
    for part in parts:
        own_request, own_pass = (
            np.unique(column, return_inverse=True)[1] for column in (part.request, part.pass_)
        )
        columns = {"request": own_request + request, "pass_": own_pass + pass_}
        numbered.append(
            replace(part, **{name: column.astype(np.int32) for name, column in columns.items()})
        )
        request = request + int(own_request.max()) + 1
        pass_ = pass_ + int(own_pass.max()) + 1
    whole = concatenate(numbered)
    return replace(whole, weights=shortened(whole.weights, MANTISSA_BITS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    options = parser.parse_args()
    trace = joined([beginnings(read_parquet(path)) for path in options.traces])
    write(trace, options.path)
    print(
        f"{options.path}: {len(np.unique(trace.pass_))} tokens, {options.path.stat().st_size} bytes"
    )


if __name__ == "__main__":
    main()
