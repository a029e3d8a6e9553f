"""CSV of `layer_id,expert_ids`: passes by the order of layers, what a server logs between, and what
is refused."""

from pathlib import Path

import pytest

from artifacts.errors import BadInput
from artifacts.importers.layer_csv import read
from artifacts.importers.routing_log import LogOptions, trace_of
from artifacts.traces.trace import DECODE, PREFILL

HEADER = "layer_id,expert_ids"


def written(folder: Path, *lines: str) -> Path:
    path = folder / "moe_expert_selection.log"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_pass_begins_where_the_layer_falls(tmp_path: Path) -> None:
    prompt = ["3,52 40", "3,32 115", "4,1 2", "4,5 6"]
    decoded = ["3,7 8", "gate_input,4,0,0.123 -0.456", "4,9 10", "3,11 12", "4,13 14"]
    trace = trace_of(
        read(written(tmp_path, HEADER, *prompt, *decoded, HEADER, *prompt), LogOptions())
    )
    steps = [step for step in trace.steps() if step.layer == 0]
    assert [step.phase for step in steps] == [PREFILL, DECODE, DECODE, PREFILL]
    assert [step.experts.tolist() for step in steps] == [
        [[52, 40], [32, 115]],
        [[7, 8]],
        [[11, 12]],
        [[52, 40], [32, 115]],
    ]
    assert [step.request[0] for step in steps] == [0, 0, 0, 1]
    assert "layers 3, 4 of the log are layers 0 to 1 of the trace" in trace.assumed


@pytest.mark.parametrize("experts", ["5 6 7", '"5,6,7"', '"[5, 6, 7]"', "5;6;7"])
def test_ways_to_write_the_experts(experts: str, tmp_path: Path) -> None:
    path = written(tmp_path, "token,layer_id,expert_ids", f"0,0,{experts}", f"0,1,{experts}")
    assert trace_of(read(path, LogOptions())).experts.tolist() == [[5, 6, 7]] * 2


def test_lines_of_one_layer_are_a_pass_each(tmp_path: Path) -> None:
    trace = trace_of(read(written(tmp_path, HEADER, "3,1 2", "3,2 3", "3,3 4"), LogOptions()))
    assert len(list(trace.steps())) == 3 and (trace.phase == DECODE).all()


def test_batches(tmp_path: Path) -> None:
    lines = [
        f"{layer},{token} {8 + layer}" for _ in range(4) for layer in range(2) for token in range(3)
    ]
    trace = trace_of(read(written(tmp_path, HEADER, *lines), LogOptions(batch=3)))
    assert sorted(set(trace.request.tolist())) == [0, 1, 2] and (trace.phase == DECODE).all()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["3,52 40"], "line 1 is no header with the columns layer_id and expert_ids"),
        (
            [HEADER, "3,52 40", "3,52"],
            "line 3 has 1 experts, line 2 2; expected: as many in every line",
        ),
        (
            [HEADER, "3,52 forty"],
            (
                "line 2 has no layer with experts: '3,52 forty'; expected: layer_id,expert_ids, "
                "as 3,52 40"
            ),
        ),
        ([HEADER, "three,52 40"], "line 2 has no layer"),
        ([HEADER, "3"], "line 2 has no layer"),
        ([HEADER, "3,52 40", "4,7 7"], "line 3 has an expert twice"),
        (
            [HEADER, "0,1 2", "0,2 3", "1,1 2", "0,1 2", "1,1 2"],
            "call 0 of layer 0 has 2 tokens, of layer 1 1",
        ),
        ([HEADER], "has no line of a routed token"),
    ],
)
def test_what_is_refused(lines: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        trace_of(read(written(tmp_path, *lines), LogOptions()))
    assert says in str(refused.value)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b"layer_id,expert_ids\n\xff\xfe")
    with pytest.raises(BadInput, match="log.csv is no text"):
        read(path, LogOptions())
