"""Responses of vLLM: both layouts, prompts, several choices, what was not computed, and what is
refused."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.importers.routing_log import LogOptions, trace_of
from artifacts.importers.vllm import read
from artifacts.traces.trace import DECODE, PREFILL, Trace


def routed(tokens: int, *, layers: int = 3, top_k: int = 2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack(
        [[rng.permutation(8)[:top_k] for _ in range(layers)] for _ in range(tokens)]
    ).astype(np.uint8)


def encoded(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode("ascii")


def response(array: np.ndarray, *, prompt: int, start: int = 0) -> dict:
    """As /v1/completions answers after 0.21: a row for every token but the last."""
    return {
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": "...",
                "finish_reason": "length",
                "routed_experts": encoded(array[start:]),
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(array) + 1 - prompt},
    }


def traced(folder: Path, *responses: object, name: str = "log.jsonl") -> Trace:
    text = (
        "\n".join(map(json.dumps, responses)) if name.endswith("l") else json.dumps(list(responses))
    )
    (folder / name).write_text(text, encoding="utf-8")
    return trace_of(read(folder / name, LogOptions()))


@pytest.mark.parametrize("name", ["log.jsonl", "log.json"])
def test_a_prompt_is_one_pass_and_every_later_token_one_more(name: str, tmp_path: Path) -> None:
    first = routed(6)
    second = routed(4, seed=1)
    trace = traced(tmp_path, response(first, prompt=4), response(second, prompt=1), name=name)
    assert (trace.num_layers, trace.top_k, len(trace)) == (3, 2, 30)
    steps = [step for step in trace.steps() if step.layer == 1]
    assert [len(step.experts) for step in steps] == [4, 1, 1, 1, 1, 1, 1]
    assert [step.phase for step in steps] == [
        PREFILL,
        DECODE,
        DECODE,
        PREFILL,
        DECODE,
        DECODE,
        DECODE,
    ]
    assert np.array_equal(
        np.concatenate([step.experts for step in steps]), np.concatenate((first, second))[:, 1]
    )
    assert np.concatenate([step.token for step in steps]).tolist() == [*range(6), *range(4)]
    assert steps[2].request.tolist() == [0] and steps[3].request.tolist() == [1]
    assert any("no weights" in line for line in trace.assumed)


def test_the_layout_of_021_is_the_same_trace(tmp_path: Path) -> None:
    array = routed(6)
    old = {
        "prompt_routed_experts": array[:4].tolist(),
        "choices": [{"routed_experts": array[4:].tolist()}],
    }
    one = traced(tmp_path, old)
    other = traced(tmp_path, response(array, prompt=4))
    for name, column in one.columns().items():
        assert np.array_equal(column, other.columns()[name]), name


@pytest.mark.parametrize("answer", [None, []])
def test_an_answer_of_one_token_has_no_pass_of_its_own(answer: object, tmp_path: Path) -> None:
    old = {"prompt_routed_experts": routed(4).tolist(), "choices": [{"routed_experts": answer}]}
    assert (traced(tmp_path, old).phase == PREFILL).all()


def test_the_prompt_of_several_choices_is_computed_once(tmp_path: Path) -> None:
    prompt = routed(3)
    answers = [routed(2, seed=1), routed(4, seed=2)]
    arrays = [np.concatenate((prompt, answer)) for answer in answers]
    several = {
        "choices": [{"routed_experts": encoded(array)} for array in arrays],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3 + 5},
    }
    trace = traced(tmp_path, several)
    assert np.bincount(trace.request[trace.layer == 0]).tolist() == [5, 4]
    assert trace.phase[trace.request == 1].tolist() == [DECODE] * 12
    assert trace.token[(trace.request == 1) & (trace.layer == 0)].tolist() == [3, 4, 5, 6]
    assert not any("later token" in line for line in trace.assumed)


def test_a_prompt_may_begin_later(tmp_path: Path) -> None:
    trace = traced(tmp_path, response(routed(6), prompt=4, start=3))
    assert trace.token[trace.layer == 0].tolist() == [3, 4, 5]
    assert "1 prompts are there from a later token on" in trace.assumed


def test_what_was_not_computed_is_left_out(tmp_path: Path) -> None:
    array = routed(6).astype(np.int16)
    # a cached prefix, and a dense layer
    array[:2] = -1
    array[2:, 0] = 0
    trace = traced(tmp_path, response(array, prompt=4))
    assert trace.num_layers == 2 and (trace.layer == 0).sum() == 4
    assert np.array_equal(trace.experts[trace.layer == 0], array[2:, 1])
    said = " ".join(trace.assumed)
    assert "2 tokens came from the prefix cache" in said and "1 layers have no routing" in said


GOOD = response(routed(6), prompt=4)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([GOOD, "{"], "line 2 is no JSON"),
        ([GOOD, {"choices": None}], "line 2 has no list of choices; expected: a response of"),
        (
            [{"choices": [{"text": "."}]}],
            "line 1, choice 0 has no routed_experts: start the server with",
        ),
        ([GOOD | {"usage": None}], "line 1 has no usage.prompt_tokens"),
        (
            [GOOD | {"usage": {"prompt_tokens": 4, "completion_tokens": 2}}],
            "line 1 has 6 rows for 1 choices of a prompt",
        ),
        (
            [{"choices": [{"routed_experts": "%%"}]}],
            "neither the base64 of an .npy array nor a nested list",
        ),
        (
            [{"choices": [{"routed_experts": [[1, 2]]}]}],
            "expected: whole numbers [tokens, layers, top_k]",
        ),
        (
            [{"choices": [{"routed_experts": encoded(routed(2) * 0.5)}]}],
            "routed_experts is float64 [2, 3, 2]",
        ),
        (
            [GOOD, response(routed(3, layers=2), prompt=1)],
            "line 2, choice 0 has 2 layers and 2 experts a token",
        ),
        (
            [response(np.array([[[1, 1]], [[0, 1]]]), prompt=1)],
            "line 1, choice 0, token 0, layer 0 has an expert twice",
        ),
        ([], "holds no response"),
    ],
)
def test_what_is_refused(lines: list, says: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    with pytest.raises(BadInput) as refused:
        trace_of(read(path, LogOptions()))
    assert says in str(refused.value) and str(path) in str(refused.value)
