"""Passes and requests of a log that only has the calls of each layer, one after the other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
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
    found = list(rows)
    if not found:
        raise BadInput(f"{path} has no line of a routed token; expected: {expected}")
    _check_same_top_k(path, found)
    lines, layers, experts = zip(*found, strict=True)
    layer = np.array(layers)

    def where(row: int) -> str:
        return f"{path}, line {lines[row]}"

    numbered = number_calls(layer, *_calls(layer), options.batch, where)
    return numbered.log(layer, np.array(experts), None, where)


def _check_same_top_k(path: Path, rows: Sequence[tuple[int, int, list[int]]]) -> None:
    first, _, experts = rows[0]
    for number, _, selected in rows:
        if len(selected) != len(experts):
            raise BadInput(
                f"{path}, line {number} has {len(selected)} experts, line {first} "
                f"{len(experts)}; expected: as many in every line"
            )


def _calls(layer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each line the number of its call, a run of lines of one layer, and its place in
    it. In a log of one layer each line is a call."""
    begins = np.append(True, layer[1:] != layer[:-1]) | (layer == layer[0]).all()
    starts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    call = np.array(numbers_by_value(layer[starts].tolist()))
    return call[run], np.arange(len(layer)) - starts[run]


def numbers_by_value(values: Iterable[int]) -> list[int]:
    """Number each value among those that are equal to it, in their order, from 0."""
    numbers = defaultdict(count)
    return [next(numbers[value]) for value in values]


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
    sizes = _sizes(layer, call, where)
    left_out = int(call.max()) + 1 - len(sizes)
    notes = [f"{left_out:,} calls at the end lack layers and are left out"] if left_out else []
    if batch is None:
        return _prompted(sizes, call, place, notes)
    return _batched(sizes, call, place, batch, notes)


def _prompted(sizes: np.ndarray, call: np.ndarray, place: np.ndarray, notes: list[str]) -> Numbered:
    is_prompt = sizes > 1
    begins = is_prompt & ~np.append(False, is_prompt[:-1])
    request = np.cumsum(begins) - begins[0]
    before = np.cumsum(sizes) - sizes
    first = before[np.unique(request, return_index=True)[1]]
    at = np.minimum(call, len(sizes) - 1)
    return Numbered(
        kept=call < len(sizes),
        pass_=call,
        request=request[at],
        token=before[at] - first[request[at]] + place,
        phase=np.where(is_prompt[at], PREFILL, DECODE),
        notes=(
            *notes,
            "calls of several tokens are prompts, and a prompt after decoding begins a request",
        ),
    )


def _batched(
    sizes: np.ndarray, call: np.ndarray, place: np.ndarray, batch: int, notes: list[str]
) -> Numbered:
    if batch not in sizes:
        raise BadInput(
            f"no call has exactly {batch} tokens, as --batch {batch} expects: calls have "
            f"{_counted(sizes)}"
        )
    is_kept = np.append(sizes == batch, False)  # the last for calls that some layers lack
    at = np.minimum(call, len(sizes))
    together = (
        f"{is_kept.sum():,} calls of {batch} tokens decode {batch} requests together, known by "
        f"their place; {len(sizes) - is_kept.sum():,} other calls are left out"
    )
    return Numbered(
        kept=is_kept[at],
        pass_=call,
        request=place,
        token=(np.cumsum(is_kept) - 1)[at],
        phase=np.full(len(call), DECODE),
        notes=(*notes, together),
    )


def _counted(sizes: np.ndarray) -> str:
    found = Counter(sizes.tolist())
    return ", ".join(f"{size} ({found[size]} times)" for size in sorted(found))


def _sizes(layer: np.ndarray, call: np.ndarray, where: Callable[[int], str]) -> np.ndarray:
    """Return the tokens of each call, as far as all layers have it."""
    names = np.unique(layer)
    by_layer = [np.bincount(call[layer == name]) for name in names]
    shortest = min(map(len, by_layer))
    table = np.stack([sizes[:shortest] for sizes in by_layer])
    # A log that was cut off ends within a call of some layer.
    if shortest > 1 and (table[:, -1] != table[0, -1]).any():
        table = table[:, :-1]
    _check_same_sizes(table, names, layer, call, where)
    return table[0]


def _check_same_sizes(
    table: np.ndarray,
    names: np.ndarray,
    layer: np.ndarray,
    call: np.ndarray,
    where: Callable[[int], str],
) -> None:
    """Raise BadInput where a layer of these `names` has other sizes of calls [L, C] than the
    first."""
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
