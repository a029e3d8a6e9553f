"""Logs that have a row for each token in each layer and no borders of requests: arrays and files by
layer."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.routing_log import RoutingLog
from artifacts.traces.trace import DECODE

_NOTE = (
    "the log has no borders of requests: its tokens are one request, each decoded in a pass of "
    "its own"
)


def one_by_one(
    layers: Sequence[int],
    experts: np.ndarray,
    weights: np.ndarray,
    place: Callable[[int, int], str],
    *,
    probabilities: np.ndarray | None = None,
    notes: tuple[str, ...] = (),
) -> RoutingLog:
    """Return the log of arrays [L, T, K], and [L, T, E], of these layers; `place(layer, token)`
    counts both from 0."""
    token = np.arange(experts.shape[1])
    return RoutingLog.of_layers(
        layers,
        experts,
        place,
        request=np.zeros_like(token),
        pass_=token,
        phase=np.full_like(token, DECODE),
        token=token,
        weights=weights,
        probabilities=probabilities,
        notes=(_NOTE, *notes),
    )


def files_by_layer(path: Path, pattern: str) -> list[tuple[int, Path]]:
    """The file itself, or the files of a folder that match, by the last number in their names.
    Raises BadInput."""
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise BadInput(
            f"{path} has no file {pattern}" if path.is_dir() else f"there is no file {path}"
        )
    if len(files) == 1:
        return [(_number(files[0].stem) or 0, files[0])]
    numbers = [_number(file.stem) for file in files]
    if None in numbers or len(set(numbers)) < len(files):
        raise BadInput(
            f"the files {pattern} in {path} need the number of their layer in their names, each "
            "its own"
        )
    return sorted(zip(numbers, files, strict=True))


def check_same_length(lengths: Sequence[tuple[str, int]]) -> None:
    """Raise BadInput unless all named parts have as many tokens as the first."""
    for name, length in lengths:
        if length != lengths[0][1]:
            raise BadInput(
                f"{name} has {length:,} rows, {lengths[0][0]} {lengths[0][1]:,}; expected: a row "
                "for each token in every layer"
            )


def _number(name: str) -> int | None:
    found = re.findall(r"\d{1,6}", name)
    return int(found[-1]) if found else None
