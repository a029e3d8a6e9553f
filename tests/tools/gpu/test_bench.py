"""The bench for a GPU, its whole road on a CPU: very small models and an emulated link."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.shape import Shape
from tests.helpers.triton_process import interpret, needs_triton
from tools.bench.decoding.resident import plain_model
from tools.gpu import bench, models
from tools.gpu.bench import NO_TIME, Runs, markdown
from tools.gpu.rows import Row, attempt

pytestmark = pytest.mark.slow

TINY = {
    "tiny": True,
    "layers": None,
    "prompt": 12,
    "tokens": 3,
    "sequences": 1,
    "threads": 1,
    "scratch": None,
}
TINY |= {"lines": False, "only": ""}
TINY |= {"long_prompt": 24}
# of moectl with everything resident, with an aim, with long prompts; Accelerate's
NUM_ROWS = 2 + 2 + 4 + 1
KERNELS = """
import torch
from tools.gpu.checks import formats, kernels, packed, published
kernels.ALLOWED[torch.bfloat16] = 6e-2  # the interpreter cuts where a GPU rounds
packed.BITS, packed.CODED = (1, 3), (2,)
found = [kernels.experts("cpu", (16, 8, 2, 4), calls=1)]
found.append(kernels.prompts("cpu", (16, 8, 2, 4), num_tokens=(6,), calls=1))
found.append(kernels.experts("cpu", (16, 8, 2, 4), kind=kernels.GPT_OSS, calls=1))
found.append(kernels.prompts("cpu", (16, 8, 2, 4), kind=kernels.GPT_OSS, num_tokens=(6,), calls=1))
found.append(packed.packed("cpu", (32, 16, 2, 4), turns=1, calls=1))
found.append(packed.coded("cpu", (32, 16, 2, 4), turns=1, calls=1))
formats.GROUP = 32
found.append(published.published("cpu", "awq", sizes=(64, 32, 1), turns=1, calls=1))
print(*[passed for passed, _, _ in found])
"""


def report(tmp_path: Path, **own: object) -> dict:
    options = Namespace(
        **TINY | {"models": ["mixtral-8x7b"], "budgets": ["25%", "5%"], "limit": 1e9} | own
    )
    options.out = tmp_path / "report.json"
    found = bench.run("cpu", options)
    assert json.loads(options.out.read_text()) == found
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return report(tmp_path_factory.mktemp("bench"))


def test_every_row_is_measured_or_says_why_not(found: dict) -> None:
    rows = {(row["name"], row["budget"]): row for row in found["models"]["mixtral-8x7b"]["rows"]}
    assert len(rows) == 3 + NUM_ROWS + 2 * 3
    for row in rows.values():
        if row["why_not"]:
            assert "needs a GPU" in row["why_not"] and row["name"] == "Accelerate, CPU offload"
        else:
            assert row["ttft_ms"] > 0 and row["floor_share"] > 0
            assert (row["tpot_ms"] is None) == row["name"].startswith("prompt of 24")
            is_of_policies = row["name"].startswith("moectl") and "perfect" not in row["name"]
            assert (row["predicted_ms"] is not None) == is_of_policies, row["name"]
    on_demand = rows["moectl, on-demand", "25%"]
    assert (
        0 < on_demand["hit_rate"] < 1
        and on_demand["moved_nbytes"] > 0
        and on_demand["stall_ms"] > 0
    )
    assert on_demand["experts"] == "fused"
    assert rows["moectl, full", "100%"]["fast_nbytes"] > on_demand["fast_nbytes"]
    assert ("moectl, on-demand", "5%, all layers together") in rows
    prompt = rows["prompt of 24, moectl, on-demand", "25%"]
    assert (
        prompt["moved_nbytes"] > 0 and 0 < prompt["hit_rate"] < 1 and prompt["experts"] == "fused"
    )


def test_who_knows_the_future_prefetches_it_and_what_is_tuned_loses_nothing(found: dict) -> None:
    model = found["models"]["mixtral-8x7b"]
    rows = {row["name"]: row for row in model["rows"] if row["budget"].startswith("25%")}
    knowing = rows["moectl, perfect prefetching"]
    on_demand = rows["moectl, on-demand"]
    assert (
        knowing["hit_rate"] > on_demand["hit_rate"]
        and knowing["moved_nbytes"] <= on_demand["moved_nbytes"]
    )
    assert knowing["experts"] == rows["moectl, tuned"]["experts"] == "fused"
    tuned = model["tuned"]
    assert (tuned["routing"], tuned["miss"]) == ("standard", "fetch")
    assert f"Tuned: standard, {tuned['prefetch']}, {tuned['eviction']}" in markdown(found)


def test_the_floor_is_that_of_the_slower_of_link_and_memory(found: dict) -> None:
    model = found["models"]["mixtral-8x7b"]
    rates = found["rates"]
    for row in model["rows"]:
        if row["tpot_ms"]:
            seconds = max(
                row["moved_nbytes"] / rates["link"], model["active_nbytes"] / rates["memory"]
            )
            assert row["floor_ms"] == pytest.approx(seconds * 1e3)


def test_the_table_has_every_row(found: dict) -> None:
    lines = markdown(found).splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) == len(found["models"]["mixtral-8x7b"]["rows"])
    assert {line.count("|") for line in lines if line.startswith("|")} == {13}
    assert "of all choices" in lines[2] and "emulated" in lines[0]


def test_what_there_is_no_time_for_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_plain", lambda *_: [])
    rows = report(tmp_path, limit=0.0)["models"]["mixtral-8x7b"]["rows"]
    assert [row["why_not"] for row in rows] == [NO_TIME] * (NUM_ROWS + 2 * 3)


def test_on_a_gpu_a_row_has_it_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device decides on has no stall that events could tell."""
    opened = SimpleNamespace(
        shape=Shape(2, 8, 2, 64),
        config=SimpleNamespace(vocab_size=96),
        model=SimpleNamespace(device="cuda"),
    )
    given = []
    options = Namespace(**TINY, budgets=["25%"])
    monkeypatch.setattr(
        bench.gpu_rows, "session_row", lambda *taken: given.append(taken[1]) or Row("moectl", "25%")
    )
    runs = Runs("mixtral-8x7b", opened, None, None, None, "cuda", options, {}).all(
        "the GPU decides"
    )
    monkeypatch.setattr(Runs, "_predicted", lambda self, settings: 1.25)
    ((_, budget, work),) = runs
    row = work()
    assert (budget, row.stall_ms, row.predicted_ms) == ("25%", None, 1.25)
    assert (given[0].decide, given[0].experts, given[0].link) == ("device", "fused", "auto")


def test_a_row_that_fails_hides_no_other() -> None:
    def measure() -> Row:
        raise RuntimeError("no kernel\nfor it")

    assert attempt("x", "25%", measure) == Row("x", "25%", why_not="RuntimeError: no kernel")


def test_a_model_that_cannot_be_made_is_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(models, "save", save)
    found = report(tmp_path)
    (row,) = found["models"]["mixtral-8x7b"]["rows"]
    assert row["why_not"] == "OSError: no room" and "no room" in markdown(found)


@pytest.mark.parametrize("name", models.SHAPES)
def test_routing_is_skewed_and_alike_from_token_to_token(tmp_path: Path, name: str) -> None:
    models.save(models.SHAPES[name], tmp_path, layers=3, device="cpu", tiny=True)
    model = plain_model(tmp_path)
    ids = models.texts(model.config.vocab_size, count=1, length=200)[0]
    said = models.routing(model, ids)
    mixed = models.routing(model, np.random.default_rng(0).permutation(ids))
    assert said.repeated > mixed.repeated + 0.05 and mixed.repeated > said.by_chance
    assert said.busiest_quarter > 0.4
    assert model.dtype is torch.bfloat16


@needs_triton
def test_the_checks_of_kernels_pass_where_kernels_are_right() -> None:
    assert interpret(KERNELS) == ["True True True True True True True"]
