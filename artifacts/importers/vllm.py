"""Responses of vLLM served with `--enable-return-routed-experts`.

Two layouts (vLLM's documentation of "Routed Experts", and its test of the endpoints):

After 0.21 `choices[i].routed_experts` is the base64 of an .npy array [tokens, layers, top_k] over
prompt and answer, without the last token, which no pass sees. `routed_experts_prompt_start` of the
request cuts off its beginning.

In 0.21 it is a nested list, or the base64 of an array, of the answer; `prompt_routed_experts`
beside `choices` holds the prompt.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from artifacts.common.untrusted import read_json
from artifacts.errors import BadInput
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.importers.text_lines import is_whole, json_lines
from artifacts.traces.trace import DECODE, PREFILL

_EXPECTED = (
    "a response of /v1/completions or /v1/chat/completions whose choices have routed_experts"
)
_UNCACHED = "start the server with --no-enable-prefix-caching to have them"


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Routing computed for one choice: `experts` [T, L, K] of `prompt` tokens and then of the
    answer, from position `start` on."""

    place: str
    experts: np.ndarray
    prompt: int
    start: int


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log of all choices of all responses, one after the other, each a request. Raises
    BadInput."""
    choices = [
        choice for place, response in _responses(path) for choice in _choices(place, response)
    ]
    if not choices:
        raise BadInput(f"{path} holds no response; expected: {_EXPECTED}")
    for choice in choices:
        if choice.experts.shape[1:] != choices[0].experts.shape[1:]:
            raise BadInput(
                f"{choice.place} has {choice.experts.shape[1]} layers and "
                f"{choice.experts.shape[2]} experts a token, {choices[0].place} "
                f"{choices[0].experts.shape[1]} and {choices[0].experts.shape[2]}; expected: one "
                "model"
            )
    return _joined(choices)


def _responses(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix != ".json":
        yield from json_lines(path, _EXPECTED)
        return
    try:
        value = read_json(path)
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} cannot be read as JSON ({error}); expected: {_EXPECTED}") from error
    many = value if isinstance(value, list) else [value]
    yield from (
        (f"{path}, response {number}" if value is many else str(path), one)
        for number, one in enumerate(many)
    )


def _choices(place: str, response: object) -> Iterator[_Choice]:
    answers = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise BadInput(f"{place} has no list of choices; expected: {_EXPECTED}")
    values = [answer.get("routed_experts") for answer in answers]
    if response.get("prompt_routed_experts") is not None:
        prompt = _array(response["prompt_routed_experts"], f"{place}, prompt_routed_experts")
        start = 0
        num_prompt = len(prompt)
        # An answer of one token has no pass of its own.
        arrays = [
            _array(value, f"{place}, choice {at}") if value else prompt[:0]
            for at, value in enumerate(values)
        ]
        if any(array.shape[1:] != prompt.shape[1:] for array in arrays):
            raise BadInput(
                f"{place} has other layers or experts a token in its prompt than in a choice"
            )
        arrays = [np.concatenate((prompt, array)) for array in arrays]
    else:
        arrays = [_array(value, f"{place}, choice {at}") for at, value in enumerate(values)]
        start, num_prompt = _split(place, response, arrays)
    for number, array in enumerate(arrays):
        # The prompt of several choices is computed once.
        skipped = num_prompt if number else 0
        yield _Choice(
            f"{place}, choice {number}", array[skipped:], num_prompt - skipped, start + skipped
        )


def _split(place: str, response: dict, arrays: list[np.ndarray]) -> tuple[int, int]:
    """The position of the first row, and how many rows are of the prompt."""
    usage = response.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    prompt = usage.get("prompt_tokens")
    answer = usage.get("completion_tokens")
    if not (is_whole(prompt) and is_whole(answer)):
        raise BadInput(
            f"{place} has no usage.prompt_tokens and usage.completion_tokens, which say where "
            "answers begin"
        )
    num_rows = sum(map(len, arrays))
    count = len(arrays)
    start, odd = divmod(count * (prompt - 1) + answer - num_rows, max(1, count))
    if odd or not 0 <= start < max(prompt, 1):
        raise BadInput(
            f"{place} has {num_rows} rows for {count} choices of a prompt of "
            f"{prompt} tokens and {answer} tokens of answers; expected: one row for each token "
            "but the last of a choice"
        )
    return start, prompt - start


def _array(value: object, place: str) -> np.ndarray:
    if value is None:
        raise BadInput(
            f"{place} has no routed_experts: start the server with --enable-return-routed-experts"
        )
    try:
        if isinstance(value, str):
            array = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        else:
            array = np.array(value)
    except (ValueError, EOFError, OSError) as error:
        raise BadInput(
            f"{place}: routed_experts is neither the base64 of an .npy array nor a nested list"
        ) from error
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype.kind not in "iu":
        told = (
            f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        )
        raise BadInput(
            f"{place}: routed_experts is {told}; expected: whole numbers [tokens, layers, top_k]"
        )
    return array.astype(np.int64)


def _joined(choices: list[_Choice]) -> RoutingLog:
    lengths = np.array([len(choice.experts) for choice in choices])
    experts = np.concatenate([choice.experts for choice in choices])
    _, num_layers, top_k = experts.shape
    owner = np.repeat(np.arange(len(choices)), lengths)
    at = np.concatenate([np.arange(length) for length in lengths])
    prompt = np.array([choice.prompt for choice in choices])[owner]
    # A prompt is one pass, and each token after it one more.
    pass_in_choice = np.where(at < prompt, 0, at - prompt + (prompt > 0))
    pass_ = pass_in_choice + (np.cumsum(lengths) - lengths)[owner]
    kept, layers, notes = _computed(experts)
    rows = np.flatnonzero(kept).repeat(len(layers))
    layer = np.tile(layers, kept.sum())
    start = np.array([choice.start for choice in choices])
    return RoutingLog(
        request=owner[rows],
        pass_=pass_[rows],
        phase=np.where(at < prompt, PREFILL, DECODE)[rows],
        layer=layer,
        token=(at + start[owner])[rows],
        experts=experts[rows, layer].reshape(-1, top_k),
        weights=None,
        place=lambda row: (
            f"{choices[owner[rows[row]]].place}, token {at[rows[row]]}, layer {layer[row]}"
        ),
        notes=(
            *notes,
            "requests ran one after the other, and each prompt in one pass",
            *_cut(choices),
        ),
    )


def _computed(experts: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return which tokens [T] were routed at all, the layers that were, and notes on the others:
    vLLM fills these with -1 or 0."""
    notes = []
    is_cached = (experts == -1).all(axis=(1, 2))
    if is_cached.any():
        notes.append(
            f"{is_cached.sum():,} tokens came from the prefix cache, not computed, and are left "
            f"out; {_UNCACHED}"
        )
    # one expert cannot be selected twice
    is_empty = (experts == 0).all(axis=2) & (experts.shape[2] > 1)
    is_padded = is_empty.all(axis=1)
    if is_padded.any() and not is_padded.all():
        notes.append(f"{is_padded.sum():,} tokens have no routing (all 0) and are left out")
    kept = ~is_cached & ~is_padded
    is_dense = is_empty[kept].all(axis=0) if kept.any() else np.zeros(experts.shape[1], bool)
    if is_dense.any():
        notes.append(
            f"{is_dense.sum()} layers have no routing (all 0), as dense layers, and are left out"
        )
    return kept, np.flatnonzero(~is_dense), notes


def _cut(choices: list[_Choice]) -> list[str]:
    cut = sum(choice.prompt > 0 and choice.start > 0 for choice in choices)
    return [f"{cut:,} prompts are there from a later token on"] if cut else []
