"""CSV of the tracers that are written for llama.cpp's eval callback, which hands them the tensors
`ffn_moe_topk-LAYER` in the order of computation.

Three forms, told apart by the first line: rows under `phase,token,layer,rank,expert`
(Cartaz/llama.cpp-vulkan-moe, examples/moe-trace at 9149912a); `pos,layer,id,id,...`, positions of
prompts below 0 (thecodacus/llama.cpp, tools/moe-trace at 0bc799a0); `layer,expert`, a row for each
expert (ggml-org/llama.cpp#28544), which does not say how many a token selects.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from artifacts.errors import BadInput, BadUsage
from artifacts.importers.calls import log_of_lines
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.importers.text_lines import lines_of

_RANKED = "phase,token,layer,rank,expert"
_EXPECTED = f"rows under {_RANKED}, or pos,layer,id,id,... or layer,expert"
_Row = tuple[int, int, list[int]]


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file. Raises BadInput, and BadUsage without `top_k` for rows of one
    expert."""
    return log_of_lines(path, _rows(path, options.top_k), options, expected=_EXPECTED)


def _rows(path: Path, top_k: int | None) -> Iterator[_Row]:
    lines = lines_of(path)
    first = next(lines, None)
    if first is None:
        return
    if first[1].replace(" ", "") == _RANKED:
        yield from _ranked(path, lines)
        return
    numbers = [(first[0], _numbers(path, *first)), *((n, _numbers(path, n, t)) for n, t in lines)]
    if len(numbers[0][1]) == 2:
        yield from _one_by_one(path, numbers, top_k)
        return
    for line, (_, layer, *experts) in numbers:
        yield line, layer, experts


def _ranked(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[_Row]:
    split = [(number, text.partition(",")[2]) for number, text in lines]
    rows = [(number, _numbers(path, number, text, size=4)) for number, text in split]
    for (_, layer), of_token in groupby(rows, key=lambda row: (row[1][0], row[1][1])):
        ranks = list(of_token)
        yield ranks[0][0], layer, [row[3] for _, row in ranks]


def _one_by_one(path: Path, rows: list[tuple[int, list[int]]], top_k: int | None) -> Iterator[_Row]:
    if top_k is None:
        raise BadUsage(
            f"{path} has a row for each expert, which does not say how many a token selects: give "
            "--top-k, as --top-k 8"
        )
    for layer, run in groupby(rows, key=lambda row: row[1][0]):
        of_layer = list(run)
        if len(of_layer) % top_k:
            raise BadInput(
                f"{path}, line {of_layer[0][0]} begins {len(of_layer)} rows of layer {layer}; "
                f"expected: a multiple of {top_k}, as --top-k says"
            )
        for at in range(0, len(of_layer), top_k):
            yield of_layer[at][0], layer, [row[1] for _, row in of_layer[at : at + top_k]]


def _numbers(path: Path, number: int, text: str, *, size: int | None = None) -> list[int]:
    try:
        numbers = [int(field) for field in text.split(",")]
    except ValueError:
        numbers = []
    is_short = len(numbers) < 2 or len(numbers) == 3 if size is None else len(numbers) != size
    if is_short or max(map(abs, numbers)) >= 1 << 31:
        raise BadInput(f"{path}, line {number} is {text[:60]!r}; expected: {_EXPECTED}")
    return numbers
