"""The .pt of SGLang's expert distribution recorder in its mode `per_token`.

`records` has for each forward pass `topk_ids_of_layer` [L, T, 8 or more], -1 where nothing was
selected, `positions` [T], and `extend_seq_lens` of the prompts in it. The map
`last_physical_to_logical_map` [L, P] says which expert a physical one is. Requests are not named
(sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py at 02295fe5).
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.traces.trace import DECODE, PREFILL

_BROKEN = (  # what a file that was cut off or made by hand raises
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_EXPECTED = "what /dump_expert_distribution_record writes with the recorder's mode per_token"
_REQUESTS = (
    "the recorder names no requests: tokens that go on at a position are of the request that ended "
    "before it, the first in the batch first"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A forward pass over T tokens: its record's number, and of each token the position, the
    request, the phase and the physical experts."""

    record: int
    positions: list[int]  # [T], as the others
    request: np.ndarray
    phase: np.ndarray
    ids: np.ndarray  # [L, T, K], -1 where nothing was selected


@dataclass(slots=True)
class _Requests:
    """Requests that may go on: the next position and the number of each, those of the last pass
    first; `num_seen` have begun."""

    awaited: list[tuple[int, int]] = field(default_factory=list)
    num_seen: int = 0

    def follow(
        self, positions: list[int], sequences: Iterable[tuple[int, int]], *, has_prompts: bool
    ) -> np.ndarray:
        """Return [2, T]: the request and the phase of each token of the next pass."""
        columns = np.zeros((2, len(positions)), np.int64)
        ahead = []
        for begin, end in sequences:
            known = self._waiting_at(positions[begin])
            # a batch of prompts may decode others, each with a length of 1
            decodes = not has_prompts or known is not None and end - begin == 1
            number = self._begun() if known is None else known
            columns[:, begin:end] = [[number], [DECODE if decodes else PREFILL]]
            ahead.append((positions[end - 1] + 1, number))
        self.awaited = ahead + self.awaited
        return columns

    def _waiting_at(self, position: int) -> int | None:
        """Take the first request that goes on at a position from those awaited."""
        for one in self.awaited:
            if one[0] == position:
                self.awaited.remove(one)
                return one[1]
        return None

    def _begun(self) -> int:
        self.num_seen += 1
        return self.num_seen - 1


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file. Nothing but tensors and plain values is unpickled. Raises
    BadInput."""
    saved = _loaded(path)
    logical = _array(saved, "last_physical_to_logical_map", 2, path)
    requests = _Requests()
    passes = []
    for number, record in enumerate(saved["records"]):
        place = f"{path}, record {number}"
        ids = _array(record, "topk_ids_of_layer", 3, place)
        positions = _positions(record, ids.shape[1], place)
        _check_mapped(ids, logical, place)
        lengths = record.get("extend_seq_lens")
        sequences = _sequences(lengths, len(positions), place)
        columns = requests.follow(positions, sequences, has_prompts=lengths is not None)
        if positions:
            passes.append(_Pass(number, positions, *columns, ids))
    return _log(path, passes, logical)


def _positions(record: dict, num_tokens: int, place: str) -> list[int]:
    positions = record.get("positions")
    is_known = isinstance(positions, list) and all(isinstance(one, int) for one in positions)
    if not is_known or len(positions) != num_tokens:
        raise BadInput(f"{place} has no position for each of its tokens; expected: {_EXPECTED}")
    return positions


def _check_mapped(ids: np.ndarray, logical: np.ndarray, place: str) -> None:
    is_mapped = ids.min(initial=0) >= -1 and ids.max(initial=-1) < logical.shape[1]
    if len(ids) != len(logical) or not is_mapped:
        raise BadInput(f"{place} has experts that the map lacks; expected: {_EXPECTED}")


def _sequences(lengths: object, num_tokens: int, place: str) -> Iterator[tuple[int, int]]:
    """Yield where the tokens of each request begin and end: prompts by their lengths, then one
    token each."""
    lengths = [] if lengths is None else lengths
    is_known = isinstance(lengths, list) and all(isinstance(n, int) and n > 0 for n in lengths)
    if not is_known or sum(lengths) > num_tokens:
        raise BadInput(f"{place} has lengths of prompts that are none; expected: {_EXPECTED}")
    ends = np.cumsum([*lengths, *[1] * (num_tokens - sum(lengths))], dtype=np.int64).tolist()
    yield from zip([0, *ends], ends, strict=False)


def _log(path: Path, passes: list[_Pass], logical: np.ndarray) -> RoutingLog:
    if not any((one.ids >= 0).any() for one in passes):
        raise BadInput(f"{path} has no token; expected: {_EXPECTED}")
    layers, experts = _routed(np.concatenate([one.ids for one in passes], axis=1), logical)
    record = np.concatenate([np.full_like(one.request, one.record) for one in passes])
    return RoutingLog.of_layers(
        layers,
        experts,
        lambda _, token: f"{path}, record {record[token]}",
        request=np.concatenate([one.request for one in passes]),
        pass_=record,
        phase=np.concatenate([one.phase for one in passes]),
        token=np.concatenate([one.positions for one in passes]),
        notes=(_REQUESTS,),
    )


def _routed(ids: np.ndarray, logical: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the layers that selected experts, and the logical experts [layers, T, top_k]."""
    is_selected = ids >= 0
    top_k = is_selected.sum(axis=2).max()
    layers = np.flatnonzero(is_selected.any(axis=(1, 2)))
    experts = np.where(is_selected, logical[np.arange(len(ids))[:, None, None], ids], -1)
    return layers, experts[layers, :, :top_k]


def _loaded(path: Path) -> dict:
    import torch

    if not path.is_file():
        raise BadInput(f"there is no file {path}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except _BROKEN as error:
        raise BadInput(f"{path} is no .pt of tensors; expected: {_EXPECTED}") from error
    records = saved.get("records") if isinstance(saved, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise BadInput(f"{path} has no records; expected: {_EXPECTED}")
    return saved


def _array(holder: dict, name: str, num_dimensions: int, place: object) -> np.ndarray:
    found = holder.get(name)
    shape = getattr(found, "shape", ())
    if len(shape) != num_dimensions or found.is_floating_point():
        raise BadInput(f"{place} has no {name}; expected: {_EXPECTED}")
    return found.numpy().astype(np.int64)
