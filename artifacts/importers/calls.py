"""Passes and requests of a log that only has the calls of each layer, one after the other."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.traces.trace import DECODE, PREFILL


@dataclass(frozen=True, slots=True, eq=False)
class Numbered:
    """Pass, request, position and phase of the rows that are `kept`, and what was assumed in
    numbering them."""

    kept: np.ndarray  # [N] bool
    pass_: np.ndarray  # [N], as the others
    request: np.ndarray
    token: np.ndarray
    phase: np.ndarray
    notes: tuple[str, ...]

    def log(
        self,
        layer: np.ndarray,
        experts: np.ndarray,
        weights: np.ndarray | None,
        where: Callable[[int], str],
        *,
        notes: tuple[str, ...] = (),
    ) -> RoutingLog:
        """Return the log of the kept rows of these columns; `notes` come first."""
        rows = np.flatnonzero(self.kept)
        return RoutingLog(
            request=self.request[rows],
            pass_=self.pass_[rows],
            phase=self.phase[rows],
            layer=layer[rows],
            token=self.token[rows],
            experts=experts[rows],
            weights=None if weights is None else weights[rows],
            place=lambda row: where(rows[row]),
            notes=(*notes, *self.notes),
        )


def log_of_lines(
    path: Path, rows: Iterable[tuple[int, int, list[int]]], options: LogOptions, *, expected: str
) -> RoutingLog:
    """Return the log of lines in the order of computation: the number of the line, the layer and
    the experts of a token. All tokens of a pass stand together in a layer, and a pass begins where
    the layer falls. Raises BadInput, which says what a line is `expected` to be."""
    lines = []
    layers = []
    experts = []
    for number, layer, selected in rows:
        if experts and len(selected) != len(experts[0]):
            raise BadInput(
                f"{path}, line {number} has {len(selected)} experts, line {lines[0]} "
                f"{len(experts[0])}; expected: as many in every line"
            )
        lines.append(number)
        layers.append(layer)
        experts.append(selected)
    if not lines:
        raise BadInput(f"{path} has no line of a routed token; expected: {expected}")
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


def number_calls(
    layer: np.ndarray,
    call: np.ndarray,
    place: np.ndarray,
    batch: int | None,
    where: Callable[[int], str],
) -> Numbered:
    """Number the rows [N] of a log by the call of their layer, counted from 0 for each layer, and
    their place in it.

    Without `batch` a call of several tokens is a prompt or a part of one, and a call of one token
    decodes; a prompt after decoding begins a request. With `batch`, a call of exactly `batch`
    tokens decodes one token each of as many requests, whose place is their number, and all other
    calls are left out. `where(row)` is the place of a row in the source. Raises BadInput where
    layers disagree.
    """
    sizes, notes = _sizes(layer, call, where)
    if batch is not None:
        return _batched(sizes, call, place, batch, notes)
    is_prompt = sizes > 1
    begins = is_prompt & ~np.append(False, is_prompt[:-1])
    request = np.maximum(np.cumsum(begins) - begins[0], 0) if begins[0] else np.cumsum(begins)
    before = np.cumsum(sizes) - sizes
    first = np.array([before[request == number].min() for number in range(int(request[-1]) + 1)])
    at = np.minimum(call, len(sizes) - 1)
    notes.append(
        "calls of several tokens are prompts, and a prompt after decoding begins a request"
    )
    return Numbered(
        kept=call < len(sizes),
        pass_=call,
        request=request[at],
        token=before[at] - first[request[at]] + place,
        phase=np.where(is_prompt[at], PREFILL, DECODE),
        notes=tuple(notes),
    )


def _batched(
    sizes: np.ndarray, call: np.ndarray, place: np.ndarray, batch: int, notes: list[str]
) -> Numbered:
    is_kept = np.append(sizes == batch, False)  # the last for calls that some layers lack
    if not is_kept.any():
        found = zip(*np.unique(sizes, return_counts=True), strict=True)
        told = ", ".join(f"{size} ({count} times)" for size, count in found)
        raise BadInput(
            f"no call has exactly {batch} tokens, as --batch {batch} expects: calls have {told}"
        )
    at = np.minimum(call, len(sizes))
    notes.append(
        f"{is_kept.sum():,} calls of {batch} tokens decode {batch} requests together, known by "
        f"their place; {len(sizes) - is_kept.sum():,} other calls are left out"
    )
    return Numbered(
        kept=is_kept[at],
        pass_=call,
        request=place,
        token=(np.cumsum(is_kept) - 1)[at],
        phase=np.full(len(call), DECODE),
        notes=tuple(notes),
    )


def _sizes(
    layer: np.ndarray, call: np.ndarray, where: Callable[[int], str]
) -> tuple[np.ndarray, list[str]]:
    """Tokens of each call, as far as all layers have it; a note on calls at the end that some
    layers lack."""
    names = np.unique(layer)
    by_layer = [np.bincount(call[layer == name]) for name in names]
    shortest = min(map(len, by_layer))
    longest = max(map(len, by_layer))
    table = np.stack([sizes[:shortest] for sizes in by_layer])
    # A log that was cut off ends within a call of some layer.
    if shortest > 1 and (table[:, -1] != table[0, -1]).any():
        shortest = shortest - 1
        table = table[:, :-1]
    differs = (table != table[0]).any(axis=0)
    if differs.any():
        number = int(differs.argmax())
        other = int((table[:, number] != table[0, number]).argmax())
        row = int(((layer == names[other]) & (call == number)).argmax())
        raise BadInput(
            f"{where(row)}: call {number} of layer {names[0]} has {table[0, number]} tokens, of "
            f"layer {names[other]} {table[other, number]}; expected: the same tokens in every "
            "layer"
        )
    left_out = longest - shortest
    return table[0], [
        f"{left_out:,} calls at the end lack layers and are left out"
    ] if left_out else []
