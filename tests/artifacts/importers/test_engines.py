"""Files of other engines, written here as their writers write them: what they become, and what is
refused."""

import json
import struct
from importlib import import_module
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from artifacts.importers.routing_log import LogOptions, trace_of
from artifacts.traces.trace import DECODE, PREFILL, Trace

# A prompt of two tokens and two decoded ones, in two layers: by pass, layer and token the experts.
PASSES = [[[[5, 2], [1, 3]], [[0, 4], [6, 7]]], [[[2, 1]], [[3, 0]]], [[[5, 3]], [[7, 4]]]]
LAYERS = (3, 4)


def rows() -> list[tuple[int, int, int, list[int]]]:
    """Pass, position, layer and experts in the order of computation."""
    begins = [0, 2, 3]
    return [
        (number, begins[number] + at, layer, experts)
        for number, by_layer in enumerate(PASSES)
        for layer, tokens in zip(LAYERS, by_layer, strict=True)
        for at, experts in enumerate(tokens)
    ]


def ranked() -> str:
    return "phase,token,layer,rank,expert\n" + "".join(
        f"{'decode' if number else 'prefill'},{at},{layer},{rank},{expert}\n"
        for number, at, layer, experts in rows()
        for rank, expert in enumerate(experts)
    )


def by_position() -> str:
    return "".join(
        f"{at if number else at - 2},{layer},{','.join(map(str, experts))}\n"
        for number, at, layer, experts in rows()
    )


def by_expert() -> str:
    return "".join(f"{layer},{expert}\n" for *_, layer, experts in rows() for expert in experts)


def ds4() -> str:
    lines = (f"{layer} {' '.join(map(str, experts))}\n" for *_, layer, experts in rows())
    return "# ds4 expert trace v1\n" + "".join(lines)


def playbook() -> str:
    return "".join(
        json.dumps({"t": at, "layer": layer, "experts": experts, "phase": phase}) + "\n"
        for number, at, layer, experts in rows()
        for phase in ["decode" if number else "prefill"]
    )


def record(layer: int, values: list[int], weights: list[float] | None = None) -> bytes:
    size = len(values)
    return struct.pack(f"<{2 + size}i{size}f", layer, size, *values, *(weights or [0.0] * size))


def strata(*, tags: bool = True, rejected: int = 0) -> bytes:
    """The windows of PASSES, each with `rejected` drafts more."""
    data = record(-2, [2]) + record(-3, [9]) + record(-4, [1, 2, 3]) if tags else b""
    for number, by_layer in enumerate(PASSES):
        for layer, tokens in zip(LAYERS, by_layer, strict=True):
            for experts in [*tokens, *[[6, 1]] * rejected]:
                data += record(layer, experts, [0.75, 0.25])
        kept = len(by_layer[0])
        if tags:
            data += record(-1, [number, kept + rejected, kept - 1, int(number > 0)])
    return data


def recorded() -> dict:
    """What SGLang saves: physical experts, a layer without any, and top-k padded to three."""
    records = []
    at = 0
    for number, by_layer in enumerate(PASSES):
        num_tokens = len(by_layer[0])
        ids = torch.full((3, num_tokens, 3), -1, dtype=torch.int32)
        ids[1:, :, :2] = torch.tensor(by_layer)
        records.append(
            {
                "forward_pass_id": 7 + number,
                "rank": 0,
                "gatherer_key": "primary",
                "input_ids": [11] * num_tokens,
                "positions": list(range(at, at + num_tokens)),
                "extend_seq_lens": [num_tokens] if number == 0 else None,
                "forward_mode": 2 if number else 1,
                "topk_ids_of_layer": ids,
                "misc_objects": [],
                "global_physical_count": torch.zeros(3, 8, dtype=torch.int32),
            }
        )
        at += num_tokens
    physical = torch.arange(8).repeat(3, 1)
    return {"records": records, "last_physical_to_logical_map": physical}


def imported(kind: str, path: Path, content: object, top_k: int | None = None) -> Trace:
    if isinstance(content, dict):
        torch.save(content, path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    read = import_module(f"artifacts.importers.{kind}").read
    return trace_of(read(path, LogOptions(top_k=top_k)))


@pytest.mark.parametrize(
    ("kind", "content", "top_k"),
    [
        ("llama_cpp", ranked(), None),
        ("llama_cpp", by_position(), None),
        ("llama_cpp", by_expert(), 2),
        ("ds4", ds4(), None),
        ("moe_jsonl", playbook(), None),
        ("strata", strata(), None),
        ("strata", strata(rejected=2), None),
        ("strata", strata(tags=False), None),
        ("sglang", recorded(), None),
    ],
)
def test_each_becomes_the_passes_that_ran(
    kind: str, content: object, top_k: int | None, tmp_path: Path
) -> None:
    trace = imported(kind, tmp_path / "log", content, top_k)
    steps = list(trace.steps())
    assert [step.layer for step in steps] == [0, 1] * 3
    assert [step.experts.tolist() for step in steps] == [one for pass_ in PASSES for one in pass_]
    assert [step.phase for step in steps] == [PREFILL] * 2 + [DECODE] * 4
    assert trace.request.tolist() == [0] * 8
    assert trace.token[trace.layer == 0].tolist() == [0, 1, 2, 3]


def test_strata_s_weights_are_kept_and_rejected_drafts_are_told(tmp_path: Path) -> None:
    trace = imported("strata", tmp_path / "log", strata(rejected=2) + record(3, [1, 2]))
    assert trace.weights.tolist() == [[0.75, 0.25]] * 8
    assert "6 drafts were rejected, and are left out" in trace.assumed
    assert "1 records after the last window are left out" in trace.assumed


def test_requests_of_sglang_go_on_where_they_ended(tmp_path: Path) -> None:
    """Two prompts, of which a physical expert 0 is the logical 3, then a token of each, in the same
    order, beside a prompt of one token."""

    def one(positions: list[int], lengths: list[int] | None) -> dict:
        ids = torch.arange(len(positions), dtype=torch.int32).reshape(1, -1, 1)
        return {"topk_ids_of_layer": ids, "positions": positions, "extend_seq_lens": lengths}

    saved = {
        "records": [one([0, 1, 0, 1], [2, 2]), one([2, 2, 40], [1, 1, 1])],
        "last_physical_to_logical_map": torch.tensor([[3, 1, 2, 0]]),
    }
    trace = imported("sglang", tmp_path / "log", saved)
    assert trace.request.tolist() == [0, 0, 1, 1, 0, 1, 2]
    assert trace.phase.tolist() == [PREFILL] * 4 + [DECODE] * 2 + [PREFILL]
    assert trace.experts.ravel().tolist() == [3, 1, 2, 0, 3, 1, 2]


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("llama_cpp", "3,1,x\n", "line 1 is '3,1,x'; expected: rows under phase,token"),
        ("llama_cpp", "0,3,1,2\n0,4,1\n", "line 2 is '0,4,1'"),
        ("llama_cpp", "phase,token,layer,rank,expert\ndecode,1\n", "line 2 is '1'"),
        ("llama_cpp", "\n", "has no line of a routed token"),
        ("ds4", "3 52 40\n", "line 1 is '3 52 40'; expected: the line '# ds4 expert trace v1'"),
        ("ds4", "# ds4 expert trace v1\n3\n", "line 2 is '3'"),
        ("strata", b"STRP" + bytes(40), "is a profile of Strata"),
        ("strata", strata()[:-4], "is no record at byte"),
        ("strata", record(-2, [3]), "is of format"),
        ("strata", record(3, [1, 2]) + record(-1, [0, 2, 0, 1]), "window of 2 positions"),
        ("strata", record(3, [1, 2]) + record(-1, [0]), "without saying how"),
        ("sglang", b"PK\x03\x04", "is no .pt of tensors"),
        ("sglang", {"logical_count": torch.zeros(2)}, "has no records"),
        ("sglang", {"records": []}, "has no last_physical_to_logical_map"),
        ("sglang", recorded() | {"records": []}, "has no token"),
        ("sglang", recorded() | {"records": [{}]}, "record 0 has no topk_ids_of_layer"),
        (
            "sglang",
            recorded() | {"last_physical_to_logical_map": torch.zeros(3, 2, dtype=torch.int32)},
            "record 0 has experts that the map lacks",
        ),
    ],
)
def test_what_is_refused(kind: str, content: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says.replace("[", r"\[")):
        imported(kind, tmp_path / "log", content)


def test_rows_of_one_expert_need_the_number_of_a_token_s(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="give --top-k"):
        imported("llama_cpp", tmp_path / "log", by_expert())
    with pytest.raises(BadInput, match="a multiple of 3"):
        imported("llama_cpp", tmp_path / "log", by_expert(), 3)


class _Planted:
    def __reduce__(self) -> tuple:
        return (print, ("code of the file ran",))


def test_code_in_a_pickle_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="is no .pt of tensors"):
        imported("sglang", tmp_path / "log", {"records": [_Planted()]})
    assert capsys.readouterr().out == ""
