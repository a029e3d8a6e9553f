"""CSV with `layer_id,expert_ids`, a line for each token and layer in the order of computation.

`3,52 40 85 110`: patched llama.cpp servers log so. All tokens of a pass stand together in a layer,
and a pass begins where the layer falls. Lines of `gate_input`, which the same servers log between
them, and further columns are not read.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.calls import number_calls
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.importers.text_lines import lines_of

_COLUMNS = ("layer_id", "expert_ids")
_EXPECTED = "layer_id,expert_ids, as 3,52 40 85 110"
_NUMBERS = re.compile(r"\d{1,9}([\s,;]+\d{1,9})*")


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file. Raises BadInput."""
    lines = []
    layers = []
    experts = []
    for number, layer, selected in _rows(path):
        if experts and len(selected) != len(experts[0]):
            raise BadInput(
                f"{path}, line {number} has {len(selected)} experts, line {lines[0]} "
                f"{len(experts[0])}; expected: as many in every line"
            )
        lines.append(number)
        layers.append(layer)
        experts.append(selected)
    if not lines:
        raise BadInput(f"{path} has no line below its header; expected: {_EXPECTED}")
    layer = np.array(layers)
    begins = np.append(True, layer[1:] != layer[:-1]) | (layer == layer[0]).all()
    starts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    place = np.arange(len(layer)) - starts[run]

    def where(row: int) -> str:
        return f"{path}, line {lines[row]}"

    numbered = number_calls(layer, _calls(layer, starts)[run], place, options.batch, where)
    return numbered.log(layer, np.array(experts), None, where)


def _calls(layer: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return [R]: the number of each run of lines among the runs of its layer, from 0."""
    calls = defaultdict(count)
    return np.array([next(calls[name]) for name in layer[starts].tolist()])


def _rows(path: Path) -> Iterator[tuple[int, int, list[int]]]:
    """Line number, layer and experts of each line."""
    header: list[str] | None = None
    for number, line in lines_of(path):
        fields = [field.strip() for field in next(csv.reader([line]))]
        if fields[0] == "gate_input":
            continue
        if set(_COLUMNS) <= set(fields):
            header = fields
            continue
        if header is None:
            raise BadInput(
                f"{path}, line {number} is no header with the columns {' and '.join(_COLUMNS)}"
            )
        row = dict(zip(header, fields, strict=False))
        layer, experts = (row.get(name, "").strip("[]() ") for name in _COLUMNS)
        if not (_NUMBERS.fullmatch(layer) and layer.isdecimal() and _NUMBERS.fullmatch(experts)):
            raise BadInput(
                f"{path}, line {number} has no layer with experts: {line[:60]!r}; expected: "
                f"{_EXPECTED}"
            )
        yield number, int(layer), [int(one) for one in re.split(r"[\s,;]+", experts)]
