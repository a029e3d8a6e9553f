"""The binary that Strata's `--dump-routing` writes.

A record is int32 layer and k, k int32 ids and k float32 weights, little-endian. A layer below 0 is
a tag: -2 the format's version, the first record; -3 a request begins; -1 after the records of a
window, its number, how many positions it has, how many drafts were accepted, and 0 for a prompt
(Niko1221/Strata, include/strata/core/routing_trace.hpp, version 2; files before it have no tags).
A window is a pass over one token and drafts after it, layer by layer.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.calls import log_of_lines, numbers_by_value
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.traces.trace import DECODE, PREFILL

_COMMIT = -1
_FORMAT = -2
_REQUEST = -3
_VERSION = 2
_EXPECTED = "records of --dump-routing: layer, k, k ids, k weights"


class _Record(NamedTuple):
    """The experts of one position in one layer, or a tag and its values."""

    number: int
    layer: int
    ids: np.ndarray
    weights: np.ndarray


class _Row(NamedTuple):
    """A record that was committed, with its place in the log."""

    request: int
    pass_: int
    phase: int
    token: int
    record: _Record


@dataclass(slots=True)
class _Windows:
    """The `rows` of the windows that were committed, and the records since the last commit, `open`.
    The next window begins at position `token` of its request."""

    rows: list[_Row] = field(default_factory=list)
    open: list[_Record] = field(default_factory=list)
    request: int = 0
    token: int = 0
    num_windows: int = 0
    num_rejected: int = 0

    def begin_request(self) -> None:
        self.request += bool(self.num_windows)
        self.token = 0

    def commit(self, place: str, values: np.ndarray) -> None:
        """Keep the positions that were accepted. Raises BadInput for a layer without one of
        them."""
        if len(values) < 4:
            raise BadInput(f"{place} ends a window without saying how; expected: {_EXPECTED}")
        _, num_positions, num_accepted, phase = values[:4].tolist()
        self._check(place, num_positions, num_accepted)
        kind = DECODE if phase else PREFILL
        ats = numbers_by_value(record.layer for record in self.open)
        for at, record in zip(ats, self.open, strict=True):
            if at <= num_accepted:
                row = _Row(self.request, self.num_windows, kind, self.token + at, record)
                self.rows.append(row)
        self.open = []
        self.num_windows += 1
        self.num_rejected += num_positions - 1 - num_accepted
        self.token += 1 + num_accepted

    def _check(self, place: str, num_positions: int, num_accepted: int) -> None:
        found = set(Counter(record.layer for record in self.open).values())
        if found - {num_positions} or not 0 <= num_accepted < max(num_positions, 1):
            raise BadInput(
                f"{place} ends a window of {num_positions} positions and {num_accepted} accepted "
                f"drafts, whose layers have {sorted(found)}; expected: as many"
            )


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file; drafts that were rejected are left out. Raises BadInput."""
    windows = _Windows()
    for record in _records(path, _words(path)):
        place = f"{path}, record {record.number}"
        if record.layer >= 0:
            windows.open.append(record)
        elif record.layer == _FORMAT and record.ids.tolist() != [_VERSION]:
            raise BadInput(f"{place} is of format {record.ids.tolist()}; expected: {_VERSION}")
        elif record.layer == _REQUEST:
            windows.begin_request()
        elif record.layer == _COMMIT:
            windows.commit(place, record.ids)
    if not windows.rows:
        rows = [(record.number, record.layer, record.ids.tolist()) for record in windows.open]
        return log_of_lines(path, rows, options, expected=_EXPECTED)
    return _log(path, windows)


def _words(path: Path) -> np.ndarray:
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    data = path.read_bytes()
    if data[:4] == b"STRP":
        raise BadInput(
            f"{path} is a profile of Strata, an order of experts without tokens, of which no trace "
            "can be made: record one by --dump-routing"
        )
    return np.frombuffer(data, "<i4", len(data) // 4)


def _records(path: Path, words: np.ndarray) -> list[_Record]:
    """Return the records of a file. Raises BadInput where one is cut off."""
    records = []
    at = 0
    while at < len(words):
        k = int(words[at + 1]) if at + 1 < len(words) else 0
        values = words[at + 2 :][: 2 * k]
        if k < 1 or len(values) < 2 * k:
            raise BadInput(f"{path} is no record at byte {4 * at}; expected: {_EXPECTED}")
        layer = int(words[at])
        records.append(_Record(len(records), layer, values[:k], values[k:].view("<f4")))
        at += 2 + 2 * k
    return records


def _log(path: Path, windows: _Windows) -> RoutingLog:
    request, pass_, phase, token, records = zip(*windows.rows, strict=True)
    number, layer, experts, weights = zip(*records, strict=True)
    if len({len(ids) for ids in experts}) > 1:
        raise BadInput(f"{path} has records of several numbers of experts; expected: one")
    weights = np.array(weights)
    return RoutingLog(
        request=np.array(request),
        pass_=np.array(pass_),
        phase=np.array(phase),
        layer=np.array(layer),
        token=np.array(token),
        experts=np.array(experts, np.int64),
        weights=weights if weights.any() else None,
        place=lambda row: f"{path}, record {number[row]}",
        notes=_notes(windows),
    )


def _notes(windows: _Windows) -> tuple[str, ...]:
    rejected = f"{windows.num_rejected:,} drafts were rejected, and are left out"
    if not windows.open:
        return (rejected,)
    return rejected, f"{len(windows.open):,} records after the last window are left out"
