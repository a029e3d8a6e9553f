"""The .pt of SGLang's expert distribution recorder in its mode `per_token`.

`records` has for each forward pass `topk_ids_of_layer` [L, T, 8 or more], -1 where nothing was
selected, `positions` [T], and `extend_seq_lens` of the prompts in it. The map
`last_physical_to_logical_map` [L, P] says which expert a physical one is. Requests are not named
(sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py at 02295fe5).
"""

import pickle
from collections.abc import Iterator
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


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file. Nothing but tensors and plain values is unpickled. Raises
    BadInput."""
    saved = _loaded(path)
    logical = _array(saved, "last_physical_to_logical_map", 2, path)
    awaited: list[tuple[int, int]] = []  # the next position of each request, and its number
    parts = []
    num_requests = 0
    for number, record in enumerate(saved["records"]):
        place = f"{path}, record {number}"
        ids = _array(record, "topk_ids_of_layer", 3, place)
        positions = record.get("positions")
        is_known = isinstance(positions, list) and all(isinstance(one, int) for one in positions)
        if not is_known or len(positions) != ids.shape[1]:
            raise BadInput(f"{place} has no position for each of its tokens; expected: {_EXPECTED}")
        is_mapped = ids.min(initial=0) >= -1 and ids.max(initial=-1) < logical.shape[1]
        if len(ids) != len(logical) or not is_mapped:
            raise BadInput(f"{place} has experts that the map lacks; expected: {_EXPECTED}")
        request, phase = np.zeros((2, len(positions)), np.int64)
        lengths = record.get("extend_seq_lens")
        ahead = []
        for begin, end in _sequences(lengths, len(positions), place):
            known = next((one for one in awaited if one[0] == positions[begin]), None)
            # a batch of prompts may decode others, each with a length of 1
            decodes = lengths is None or known is not None and end - begin == 1
            phase[begin:end] = DECODE if decodes else PREFILL
            if known is None:
                known = (positions[begin], num_requests)
                num_requests += 1
            else:
                awaited.remove(known)
            request[begin:end] = known[1]
            ahead.append((positions[end - 1] + 1, known[1]))
        awaited = ahead + awaited
        parts.append((number, phase, request, np.array(positions), ids))
    return _log(path, parts, logical)


def _sequences(lengths: object, num_tokens: int, place: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each request's tokens: those of prompts by their lengths, then one
    token each."""
    lengths = [] if lengths is None else lengths
    is_known = isinstance(lengths, list) and all(isinstance(n, int) and n > 0 for n in lengths)
    if not is_known or sum(lengths) > num_tokens:
        raise BadInput(f"{place} has lengths of prompts that are none; expected: {_EXPECTED}")
    ends = np.cumsum([*lengths, *[1] * (num_tokens - sum(lengths))], dtype=np.int64).tolist()
    yield from zip([0, *ends], ends, strict=False)


def _log(path: Path, parts: list[tuple], logical: np.ndarray) -> RoutingLog:
    parts = [part for part in parts if len(part[2])]
    ids = np.concatenate([part[4] for part in parts], axis=1) if parts else np.zeros((0, 0, 0))
    top_k = int((ids >= 0).sum(axis=2).max(initial=0))
    layers = np.flatnonzero((ids >= 0).any(axis=(1, 2)))
    if not top_k:
        raise BadInput(f"{path} has no token; expected: {_EXPECTED}")
    sizes = [len(part[2]) for part in parts]
    experts = logical[np.arange(len(ids))[:, None, None], ids][layers]
    experts[ids[layers] < 0] = -1
    num_tokens = ids.shape[1]

    def column(values: list) -> np.ndarray:
        return np.tile(np.repeat(values, sizes), len(layers))

    record = column([part[0] for part in parts])
    return RoutingLog(
        request=np.tile(np.concatenate([part[2] for part in parts]), len(layers)),
        pass_=record,
        phase=np.tile(np.concatenate([part[1] for part in parts]), len(layers)),
        layer=np.repeat(layers, num_tokens),
        token=np.tile(np.concatenate([part[3] for part in parts]), len(layers)),
        experts=experts[:, :, :top_k].reshape(-1, top_k),
        weights=None,
        place=lambda row: f"{path}, record {record[row]}",
        notes=(_REQUESTS,),
    )


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
