"""The binary that Strata's `--dump-routing` writes.

A record is int32 layer and k, k int32 ids and k float32 weights, little-endian. A layer below 0 is
a tag: -2 the format's version, the first record; -3 a request begins; -1 after the records of a
window, its number, how many positions it has, how many drafts were accepted, and 0 for a prompt
(Niko1221/Strata, include/strata/core/routing_trace.hpp, version 2; files before it have no tags).
A window is a pass over one token and drafts after it, layer by layer.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.calls import log_of_lines
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.traces.trace import DECODE, PREFILL

_COMMIT = -1
_FORMAT = -2
_REQUEST = -3
_VERSION = 2
_EXPECTED = "records of --dump-routing: layer, k, k ids, k weights"


@dataclass(slots=True)
class _Windows:
    """The rows of the windows that were committed, and those since the last commit, as record,
    layer, ids and weights."""

    rows: list[tuple[int, int, int, int, int, np.ndarray, np.ndarray]] = field(default_factory=list)
    open: list[tuple[int, int, np.ndarray, np.ndarray]] = field(default_factory=list)
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
        seen: dict[int, int] = {}
        for record, layer, ids, weights in self.open:
            at = seen.get(layer, 0)
            seen[layer] = at + 1
            if at <= num_accepted:
                kind = DECODE if phase else PREFILL
                row = (record, self.num_windows, kind, layer, self.token + at, ids, weights)
                self.rows.append((self.request, *row))
        if set(seen.values()) - {num_positions} or not 0 <= num_accepted < max(num_positions, 1):
            raise BadInput(
                f"{place} ends a window of {num_positions} positions and {num_accepted} accepted "
                f"drafts, whose layers have {sorted(set(seen.values()))}; expected: as many"
            )
        self.open = []
        self.num_windows += 1
        self.num_rejected += num_positions - 1 - num_accepted
        self.token += 1 + num_accepted


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file; drafts that were rejected are left out. Raises BadInput."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    data = path.read_bytes()
    if data[:4] == b"STRP":
        raise BadInput(
            f"{path} is a profile of Strata, an order of experts without tokens, of which no trace "
            "can be made: record one by --dump-routing"
        )
    windows = _Windows()
    for number, (layer, ids, weights) in enumerate(_records(path, data)):
        place = f"{path}, record {number}"
        if layer >= 0:
            windows.open.append((number, layer, ids, weights))
        elif layer == _FORMAT and ids.tolist() != [_VERSION]:
            raise BadInput(f"{place} is of format {ids.tolist()}; expected: {_VERSION}")
        elif layer == _REQUEST:
            windows.begin_request()
        elif layer == _COMMIT:
            windows.commit(place, ids)
    if not windows.rows:
        rows = [(number, layer, ids.tolist()) for number, layer, ids, _ in windows.open]
        return log_of_lines(path, rows, options, expected=_EXPECTED)
    return _log(path, windows)


def _records(path: Path, data: bytes) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Return layer, ids and weights of each record. Raises BadInput where one is cut off."""
    words = np.frombuffer(data, "<i4", len(data) // 4)
    records = []
    at = 0
    while at < len(words):
        layer, k = words[at : at + 2].tolist() if at + 2 <= len(words) else (0, 0)
        end = at + 2 + 2 * k
        if k < 1 or end > len(words):
            raise BadInput(f"{path} is no record at byte {4 * at}; expected: {_EXPECTED}")
        ids = words[at + 2 : at + 2 + k]
        records.append((layer, ids, words[at + 2 + k : end].view("<f4")))
        at = end
    return records


def _log(path: Path, windows: _Windows) -> RoutingLog:
    request, record, pass_, phase, layer, token, experts, weights = zip(*windows.rows, strict=True)
    if len({len(ids) for ids in experts}) > 1:
        raise BadInput(f"{path} has records of several numbers of experts; expected: one")
    weights = np.array(weights)
    notes = [f"{windows.num_rejected:,} drafts were rejected, and are left out"]
    if windows.open:
        notes.append(f"{len(windows.open):,} records after the last window are left out")
    return RoutingLog(
        request=np.array(request),
        pass_=np.array(pass_),
        phase=np.array(phase),
        layer=np.array(layer),
        token=np.array(token),
        experts=np.array(experts, np.int64),
        weights=weights if weights.any() else None,
        place=lambda row: f"{path}, record {record[row]}",
        notes=tuple(notes),
    )
