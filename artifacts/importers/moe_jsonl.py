"""JSON lines of a token in a layer, as loggers patched into vLLM write them (vLLM-MoE-Logger and
its relatives).

A line is `{"type": "route", "req_id", "token_idx", "layer", "topk_ids", "topk_weights"}`; lines of
another type, as the first one's `meta`, are not read. `token_idx` counts either in one call of the
layer, and begins anew with each, or in the request.

`{"t", "layer", "experts", "phase"}` is read too, as alesha-pro/inference-optimization-playbook
(tools/README.md) has it: `t` counts the tokens, and those of one run of `prefill` are one pass.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput
from artifacts.importers.calls import number_calls
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.importers.text_lines import is_whole, json_lines
from artifacts.traces.trace import DECODE, PREFILL

_LAYER = ("layer", "layer_id", "layer_idx")
_EXPERTS = ("topk_ids", "experts", "expert_ids", "selected_experts")
_WEIGHTS = ("topk_weights", "gating_probs", "weights", "expert_weights", "selected_probs")
_TOKEN = ("token_idx", "token", "token_index", "position", "t")
_PROMPT = ("prefill", "prompt")
_REQUEST = ("req_id", "request_id", "request", "dataset", "problem_id")
_EXPECTED = (
    '{"layer": 0, "token_idx": 0, "topk_ids": [3, 1], "topk_weights": [0.6, 0.4]}, weights in all '
    "lines or in none"
)
_AS_CALLS = "token_idx begins anew with every call of a layer"
_AS_POSITIONS = (
    "token_idx is a position in its request, and each token is decoded in a pass of its own, "
    "but for tokens of a prompt that are named so"
)


@dataclass(slots=True)
class _Rows:
    """The routed lines of all files in their order; `number` has the request's by its name."""

    layer: list[int] = field(default_factory=list)
    token: list[int] = field(default_factory=list)
    request: list[int] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    is_prompt: list[bool] = field(default_factory=list)
    number: dict[tuple, int] = field(default_factory=dict)

    def add(self, place: str, line: object) -> None:
        if not isinstance(line, dict):
            raise BadInput(f"{place} is no JSON object; expected: {_EXPECTED}")
        if line.get("type", "route") != "route":
            return
        layer, token, experts = (_first_of(line, names) for names in (_LAYER, _TOKEN, _EXPERTS))
        weights = _first_of(line, _WEIGHTS)
        is_list = (
            isinstance(experts, list) and experts and all(isinstance(one, int) for one in experts)
        )
        if not (is_whole(layer) and is_whole(token) and is_list):
            raise BadInput(
                f"{place} lacks a layer, a token_idx or a list of experts; expected: {_EXPECTED}"
            )
        if self.experts and len(experts) != len(self.experts[0]):
            raise BadInput(
                f"{place} has {len(experts)} experts, {self.places[0]} {len(self.experts[0])}"
            )
        if (weights is not None) != (len(self.weights) == len(self.experts)) and self.experts:
            raise BadInput(
                f"{place} differs from the lines before in having weights; expected: {_EXPECTED}"
            )
        if weights is not None:
            is_list = isinstance(weights, list) and all(
                isinstance(one, int | float) for one in weights
            )
            if not is_list or len(weights) != len(experts):
                raise BadInput(
                    f"{place} needs a weight for each of its {len(experts)} experts; expected: "
                    f"{_EXPECTED}"
                )
            self.weights.append(weights)
        name = tuple(str(line[key]) for key in _REQUEST if key in line)
        self.request.append(self.number.setdefault(name, len(self.number)))
        self.layer.append(layer)
        self.token.append(token)
        self.experts.append(experts)
        self.places.append(place)
        self.is_prompt.append(line.get("phase") in _PROMPT)


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a file, or in all .jsonl files of a folder, each with layers of its own.
    Raises BadInput."""
    rows = _Rows()
    owners = {}
    for file in _files(path):
        begin = len(rows.layer)
        for place, line in json_lines(file, _EXPECTED):
            rows.add(place, line)
        for layer in set(rows.layer[begin:]):
            if owners.setdefault(layer, file) != file:
                raise BadInput(
                    f"{file} has layer {layer}, as {owners[layer]}; expected: other layers in "
                    "every file"
                )
    if not rows.layer:
        raise BadInput(f"{path} has no line of a routed token; expected: {_EXPECTED}")
    layer, token, request = (np.array(column) for column in (rows.layer, rows.token, rows.request))
    experts = np.array(rows.experts)
    weights = np.array(rows.weights, np.float64) if rows.weights else None
    where = rows.places.__getitem__
    call = _calls(layer, token, request)
    if call is None and options.batch is None:
        tokens, row = np.unique(np.stack((request, token)), axis=1, return_inverse=True)
        row = row.ravel()
        is_prompt = np.zeros(tokens.shape[1], bool)
        is_prompt[row[rows.is_prompt]] = True
        # a token of a prompt is in the pass of the one before if that is one too
        joins = is_prompt & np.append(False, is_prompt[:-1] & (tokens[0, 1:] == tokens[0, :-1]))
        pass_ = np.cumsum(~joins)[row] - 1
        routed = (layer, token, experts, weights)
        phase = np.where(is_prompt[row], PREFILL, DECODE)
        return RoutingLog(request, pass_, phase, *routed, where, notes=(_AS_POSITIONS,))
    call = np.zeros_like(layer) if call is None else call
    numbered = number_calls(layer, call, token, options.batch, where)
    return numbered.log(layer, experts, weights, where, notes=(_AS_CALLS,))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(
        path.glob("*.jsonl"),
        key=lambda file: ([int(n) for n in re.findall(r"\d+", file.name)], file),
    )
    if not files:
        raise BadInput(f"the folder {path} has no .jsonl file")
    return files


def _first_of(line: dict, names: tuple[str, ...]) -> object:
    return next((line[name] for name in names if name in line), None)


def _calls(layer: np.ndarray, token: np.ndarray, request: np.ndarray) -> np.ndarray | None:
    """The call of its layer that each row belongs to; None where the tokens of no request ever
    begin anew."""
    last: dict[tuple[int, int], int] = {}
    begins_anew = False
    for key in zip(request.tolist(), layer.tolist(), token.tolist(), strict=True):
        begins_anew |= key[2] <= last.get(key[:2], -1)
        last[key[:2]] = key[2]
    if not begins_anew:
        return None
    call = np.empty(len(layer), np.int64)
    for name in np.unique(layer):
        rows = np.flatnonzero(layer == name)
        call[rows] = np.cumsum(np.diff(token[rows], prepend=-1) <= 0)
    return call
