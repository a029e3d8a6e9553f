"""JSON lines of routed tokens: calls, positions, batches, a file a layer, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput
from artifacts.importers.moe_jsonl import read
from artifacts.importers.routing_log import LogOptions, trace_of
from artifacts.traces.trace import DECODE, PREFILL

META = {"type": "meta", "model_id": "Qwen/Qwen1.5-MoE-A2.7B-Chat", "layers_logged": [0], "top_k": 2}


def line(layer: int, token: int, experts: list[int], **more: object) -> dict:
    weights = [0.6, 0.3][: len(experts)]
    return {
        "type": "route",
        "req_id": "r1",
        "token_idx": token,
        "layer": layer,
        "topk_ids": experts,
    } | ({"topk_weights": weights} | more)


def calls(layer: int, sizes: list[int]) -> list[dict]:
    """Calls of a layer, each with so many tokens; the experts tell which row it was."""
    rows = [(call, place) for call, size in enumerate(sizes) for place in range(size)]
    return [line(layer, place, [call, 100 + place]) for call, place in rows]


def written(path: Path, lines: list) -> Path:
    path.write_text(
        "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines),
        encoding="utf-8",
    )
    return path


def test_a_call_of_several_tokens_is_a_prompt_and_of_one_decodes(tmp_path: Path) -> None:
    sizes = [3, 1, 1, 2, 2, 1]
    trace = trace_of(
        read(
            written(tmp_path / "a.jsonl", [META, *calls(0, sizes), *calls(1, sizes)]), LogOptions()
        )
    )
    steps = [step for step in trace.steps() if step.layer == 1]
    assert [len(step.experts) for step in steps] == sizes
    assert [step.phase for step in steps] == [PREFILL, DECODE, DECODE, PREFILL, PREFILL, DECODE]
    assert [step.request[0] for step in steps] == [0, 0, 0, 1, 1, 1]
    assert [step.token.tolist() for step in steps] == [[0, 1, 2], [3], [4], [0, 1], [2, 3], [4]]
    assert [step.experts[0, 0] for step in steps] == list(range(6))
    assert trace.weights[0].tolist() == pytest.approx([0.6, 0.3])


def test_calls_of_a_batch_decode_one_token_of_each_request(tmp_path: Path) -> None:
    for layer in (8, 12):
        written(tmp_path / f"moe_layer{layer}.jsonl", [META, *calls(layer, [40, 3, 3, 2, 3])])
    trace = trace_of(read(tmp_path, LogOptions(batch=3)))
    assert trace.num_layers == 2 and (trace.phase == DECODE).all()
    steps = [step for step in trace.steps() if step.layer == 0]
    assert [step.request.tolist() for step in steps] == [[0, 1, 2]] * 3
    assert [step.token.tolist() for step in steps] == [[0] * 3, [1] * 3, [2] * 3]
    assert [step.experts[0, 0] for step in steps] == [1, 2, 4]
    said = " ".join(trace.assumed)
    assert (
        "2 other calls are left out" in said and "layers 8, 12 of the log are layers 0 to 1" in said
    )
    with pytest.raises(
        BadInput,
        match=r"no call has exactly 7 tokens.*2 \(1 times\), 3 \(3 times\), 40 \(1 times\)",
    ):
        read(tmp_path, LogOptions(batch=7))


def test_positions_are_passes_of_their_own(tmp_path: Path) -> None:
    """As speculative-moe logs: a token's position in its problem, experts and gating_probs, all
    layers of a token."""
    rows = [
        {
            "dataset": "gsm8k",
            "problem_id": problem,
            "layer": layer,
            "experts": [token, 50],
            "token_idx": token,
        }
        | {"gating_probs": [0.2, 0.8]}
        for problem in (4, 2)
        for token in range(3)
        for layer in range(2)
    ]
    trace = trace_of(read(written(tmp_path / "a.jsonl", rows), LogOptions()))
    assert len(list(trace.steps())) == 12 and (trace.phase == DECODE).all()
    assert trace.request[trace.layer == 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.experts[:, 0].tolist() == [50] * 12, "the strongest first"
    assert any("position in its request" in told for told in trace.assumed)


def test_a_log_that_was_cut_off_ends_with_its_last_whole_call(tmp_path: Path) -> None:
    lines = [META, *calls(0, [2, 1, 1]), *calls(1, [2, 1])]
    trace = trace_of(read(written(tmp_path / "a.jsonl", lines), LogOptions()))
    assert len(np.unique(trace.pass_)) == 2 and any(
        "1 calls at the end lack layers" in told for told in trace.assumed
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line(0, 0, [1, 2]), "{"], "a.jsonl, line 2 is no JSON"),
        ([line(0, 0, [1, 2]), []], "a.jsonl, line 2 is no JSON object"),
        (
            [line(0, 0, [1, 2]), {"layer": 0}],
            "a.jsonl, line 2 lacks a layer, a token_idx or a list of experts; expected: {",
        ),
        ([line(0, 0, [1, 2]), line(-1, 0, [1, 2])], "line 2 lacks a layer"),
        ([line(0, 0, [1, 2]), line(0, 1, [1, "2"])], "line 2 lacks a layer"),
        ([line(0, 0, [1, 2]), line(0, 1, [1])], "line 2 has 1 experts"),
        (
            [line(0, 0, [1, 2]), line(0, 1, [4, 4])],
            "a.jsonl, line 2 has an expert twice (experts 4, 4); expected: the diff",
        ),
        (
            [line(0, 0, [1, 2]), line(0, 1, [1, 70000])],
            "line 2 has an expert below 0 or above 65535",
        ),
        (
            [line(0, 0, [1, 2]), line(0, 1, [1, 2], topk_weights=[1])],
            "line 2 needs a weight for each of its 2 experts",
        ),
        (
            [line(0, 0, [1, 2]), line(0, 1, [1, 2], topk_weights=None)],
            "line 2 differs from the lines before",
        ),
        (
            [line(0, 0, [1, 2]), line(0, 1, [1, 2], topk_weights=[1, -1])],
            "line 2 has a weight that is negative",
        ),
        (
            [line(0, 0, [1, 2]), line(0, 1, [1, 2], topk_weights=[0, 0])],
            "line 2 has no weight above 0",
        ),
        (
            [*calls(0, [2, 1, 1]), *calls(1, [2, 2, 1])],
            "call 1 of layer 0 has 1 tokens, of layer 1 2",
        ),
        ([META], "has no line of a routed token"),
    ],
)
def test_what_is_refused(lines: list, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        trace_of(read(written(tmp_path / "a.jsonl", lines), LogOptions()))
    assert says in str(refused.value)


def test_two_files_with_one_layer_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        written(tmp_path / f"{name}.jsonl", calls(3, [2, 1]))
    with pytest.raises(BadInput, match=r"b.jsonl has layer 3, as .*a.jsonl"):
        read(tmp_path, LogOptions())
