"""CSV with `layer_id,expert_ids`, a line for each token and layer in the order of computation.

`3,52 40 85 110`: patched llama.cpp servers log so. All tokens of a pass stand together in a layer,
and a pass begins where the layer falls. Lines of `gate_input`, which the same servers log between
them, and further columns are not read.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.importers.calls import log_of_lines
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.importers.text_lines import lines_of

_COLUMNS = ("layer_id", "expert_ids")
_EXPECTED = "layer_id,expert_ids, as 3,52 40 85 110"
_NUMBERS = re.compile(r"\d{1,9}([\s,;]+\d{1,9})*")


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file. Raises BadInput."""
    return log_of_lines(path, _rows(path), options, expected=_EXPECTED)


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
