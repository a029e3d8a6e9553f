"""`moectl plan`: memory adds up, speeds are those of a replay, and only the config is read."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.common.host_memory import host_memory
from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import MACHINES, machine
from artifacts.modelshapes.known import MODELS, model_shape
from artifacts.modelshapes.memory import backbone_memory, backbone_of
from artifacts.traces.synthetic import generate
from moectl.cli import main
from moectl.commands.start.plan import place as plan_place
from moectl.commands.start.plan.deployment import requests_of
from moectl.commands.start.plan.fitting import RESERVE_NBYTES, PlanRequest, divided
from moectl.commands.start.plan.place import SYSTEM_NBYTES, PlanPlace
from moectl.commands.start.plan.simulation import ROUTERS
from runtime.policies.presets import presets
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.published import CONFIGS

pytestmark = pytest.mark.slow

GIB = 1 << 30

Planned = Callable[..., dict]


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A folder with a config and nothing else."""
    shutil.copy(checkpoint("qwen3_moe") / "config.json", tmp_path / "config.json")
    return tmp_path


@pytest.fixture
def planned(capfd: pytest.CaptureFixture[str]) -> Planned:
    def run(*options: str) -> dict:
        assert main(["plan", *options, "--json"]) == 0
        said = capfd.readouterr()
        assert said.err == ""
        return json.loads(said.out)

    return run


def held(folder: Path, experts: int) -> str:
    """Return the memory that holds so many experts, with a context of 16 tokens."""
    model = model_shape(str(folder))
    needs = backbone_memory(model, backbone_of(str(folder)))
    beside = needs.weights_nbytes + 16 * needs.cache_nbytes + RESERVE_NBYTES
    return f"{beside + experts * model.shape.expert_nbytes}B"


def test_many_requests_take_a_cache_each_and_share_experts(planned: Planned) -> None:
    options = ("gpt-oss-20b", "--machine", "rtx3090", "--vram", "16GB", "--context", "1000")
    alone = planned(*options)
    many = planned(*options, "--clients", "32")
    assert many["memory"]["cache_nbytes"] == 32 * alone["memory"]["cache_nbytes"]
    assert many["memory"]["share"] < alone["memory"]["share"]
    one = alone["tokens_per_s"]
    all_ = many["tokens_per_s"]
    distinct = 32 * (1 - (1 - 4 / 32) ** 32)
    assert all_["all"] > 16 * one["all"] / 4, "weights are read once for all"
    assert all_["none"] / one["none"] == pytest.approx(32 * 4 / distinct, rel=0.15), (
        "loads are what takes the time"
    )
    assert any("--clients 32 --simulate" in step for step in many["next"])


def test_enough_requests_are_made_for_all_clients() -> None:
    assert [requests_of(count) for count in (1, 8, 256)] == [
        {"requests": 4, "tokens": 512},
        {"requests": 8, "tokens": 1024},
        {"requests": 256, "tokens": 16_384},
    ]


def test_what_is_expected_is_a_replay(folder: Path, planned: Planned) -> None:
    said = planned(
        str(folder),
        "--vram",
        held(folder, 4),
        "--machine",
        "5gbps",
        "--context",
        "16",
        "--simulate",
    )
    memory = said["memory"]
    rows = {row["preset"]: row for row in said["rows"]}
    assert memory["experts_nbytes"] * 4 == memory["all_experts_nbytes"] and memory["share"] == 0.25
    assert rows.keys() == presets().keys() - {"full"}
    model = model_shape(str(folder))
    for name in ("on-demand", "near", "buddymoe"):
        outcomes = [
            Workload(
                generate(replace(kind, **requests_of(1)), model.shape), model, machine("5gbps")
            ).run(Setting(name, name, budget="25%"))
            for kind in ROUTERS.values()
        ]
        speeds = [1e3 / outcome.times["tpot_ms"] for outcome in outcomes]
        assert rows[name]["least"] == pytest.approx(min(speeds)) and rows[name][
            "most"
        ] == pytest.approx(max(speeds))
        assert rows[name]["tokens_per_s"] == pytest.approx(speeds[list(ROUTERS).index("usual")])
        assert (rows[name]["alters"] == "") == (name != "buddymoe")
    tried = [row for row in said["rows"] if not row["why"]]
    assert [row["tokens_per_s"] for row in tried] == sorted(
        (row["tokens_per_s"] for row in tried), reverse=True
    )
    assert said["fastest"] == tried[0]["preset"]
    assert said["exact"] == next(row["preset"] for row in tried if not row["alters"])
    assert any(step.startswith(f"moectl run {folder} --budget 25%") for step in said["next"])
    assert any("--budgets 25%" in step for step in said["next"]) and len(said["assumed"]) >= 5


def test_the_quick_answer_has_bounds_and_says_how_to_get_more(
    folder: Path, planned: Planned
) -> None:
    options = (str(folder), "--vram", held(folder, 4), "--machine", "5gbps", "--context", "16")
    said = planned(*options)
    bounds = said["tokens_per_s"]
    costs = Costs.of(model_shape(str(folder)), machine("5gbps"))
    shape = (2, 2)
    loaded_s = shape[0] * shape[1] * (costs.load_latency_s + costs.load_s)
    assert 1 / bounds["none"] - 1 / bounds["all"] == pytest.approx(loaded_s)
    assert 1 / bounds["share"] - 1 / bounds["all"] == pytest.approx(0.75 * loaded_s)
    assert said["rows"] == [] and said["fastest"] is None
    assert (
        said["next"][0]
        == f"moectl plan {' '.join(options)} --simulate: what to expect of each preset"
    )


def test_neither_torch_nor_the_simulator_is_imported(folder: Path) -> None:
    """They take seconds, and the answer is to be quick."""
    path = folder / "config.json"
    quantised = {"quantization_config": CONFIGS["compressed-tensors"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantised))
    code = f"""
import sys
from moectl.cli import main
assert main(["plan", "olmoe-1b-7b", "--vram", "24GB"]) == 0
assert not [name for name in ("numpy", "rich", "huggingface_hub") if name in sys.modules]
assert main(["plan", {str(folder)!r}, "--vram", "24GB", "--details"]) == 0
print([name for name in ("torch", "numba", "runtime.replay") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stderr == "[]\n", done.stderr
    assert "the checkpoint's files" in done.stdout


@pytest.mark.parametrize(
    "name", [each.name for each in MACHINES.values() if each.fast_gb is not None]
)
def test_the_memory_of_a_machine_is_known(name: str, planned: Planned) -> None:
    said = planned("qwen1.5-moe-a2.7b", "--machine", name)
    assert (said["machine"], said["memory"]["vram_nbytes"]) == (name, machine(name).fast_gb * 1e9)
    assert planned("qwen1.5-moe-a2.7b", "--machine", name, "--vram", "30GB")["vram"] == "30GB"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give this machine a GPU of that name with 10 GiB; none without a name."""
    return lambda name: monkeypatch.setattr(
        plan_place, "gpus_of_driver", lambda: [(name, 10 * GIB)] if name else []
    )


def test_without_options_it_is_for_the_gpu_of_this_machine(
    folder: Path, gpu: Callable[[str], None], planned: Planned, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu("NVIDIA GeForce RTX 4090")
    said = planned(str(folder))
    assert (said["memory"]["vram_nbytes"], said["machine"]) == (10 * GIB, "rtx4090-pcie4")
    assert planned(str(folder), "--vram", "2GiB")["machine"] == "rtx4090-pcie4"
    gpu("an accelerator")
    said = planned(str(folder))
    assert (said["machine"], said["tokens_per_s"], said["memory"]["vram_nbytes"]) == (
        None,
        None,
        10 * GIB,
    )
    assert "not known" in " ".join(said["assumed"]) and not any(
        "--simulate:" in step for step in said["next"]
    )
    assert main(["plan", str(folder), "--simulate"]) == 2 and "--machine" in capfd.readouterr().err
    gpu("")
    said = planned(str(folder))
    ram, _ = host_memory()
    assert (said["memory"]["vram_nbytes"], said["machine"]) == (ram - SYSTEM_NBYTES, None)
    assert said["ram_nbytes"] == 0 and "no GPU is found here" in " ".join(said["assumed"])
    assert planned(str(folder), "--vram", "2GiB")["machine"] == "rtx3090-pcie4"


def test_a_toy_on_a_data_sheet_has_ratios_alone(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--vram", held(folder, 8), "--machine", "rtx4090", "--context", "16", "--simulate")
    assert main(["plan", str(folder), *options]) == 0
    said = capfd.readouterr().out
    assert "times slower" in said and "on-demand" in said
    assert not re.search(r"tokens/s|ms/token|\d ms", said.partition("\nassumed:")[0])
    table = said.partition("Simulated")[2].partition("\nnext:")[0]
    assert not [name for name, one in presets().items() if one.is_study and f" {name} " in table]
    assert "first `moectl quantize`, for shadow" in table
    assert "first `moectl profile` and `moectl build-buddies`, for buddymoe" in table


def test_a_real_model_has_a_range_that_is_marked_as_a_guess(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "qwen3-30b-a3b", "--machine", "rtx4090", "--details"]) == 0
    said = capfd.readouterr().out
    assert "Quick guess for rtx4090-pcie4, unmeasured: 6.5 to 170 tokens/s" in said
    assert "the smallest known machine with that much is a100-pcie4 (80 GB)" in said


def test_everything_fits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--vram", "24GB", "--context", "16", "--simulate"]) == 0
    said = capfd.readouterr().out
    assert (
        "everything fits" in said
        and "full" in said
        and "near" not in said.split("everything fits")[0]
    )


def test_who_has_how_much() -> None:
    """Mixtral 8x7B: 3.0 GiB besides experts, 0.5 GiB of cache for 4,096 tokens, 336 MiB an
    expert."""
    name = "mixtral-8x7b"
    request = PlanRequest(name, PlanPlace.find("24GiB", "a6000-pcie4"))
    memory = divided(request, MODELS[name], backbone_memory(MODELS[name], backbone_of(name)))
    assert (
        memory.weights_nbytes / GIB == pytest.approx(2.99, abs=0.02)
        and memory.cache_nbytes == GIB // 2
    )
    total = (
        memory.weights_nbytes + memory.cache_nbytes + memory.reserve_nbytes + memory.experts_nbytes
    )
    assert total == memory.vram_nbytes == 24 * GIB
    assert memory.share == pytest.approx((24 - 2.99 - 0.5 - 1) / (256 * 336 / 1024), abs=0.001)


def test_what_cannot_be_planned_is_said(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for options, code, told in (
        ((str(folder), "--vram", "1GiB"), 4, "does not fit into 1GiB"),
        (("mixtral-8x22b", "--machine", "rtx4060"), 4, "with that much is rtx3090-pcie4 (24 GB)"),
        (
            ("mixtral-8x22b", "--machine", "rtx4060", "--json"),
            4,
            "with that much is a6000-pcie4 (48 GB)",
        ),
        (
            ("deepseek-v3", "--vram", "8GB", "--context", "20000000"),
            4,
            "no machine that moectl knows",
        ),
        (("mixtral-8x7c", "--vram", "24GB"), 2, "mixtral-8x7b"),
        ((str(folder), "--vram", "24GB", "--machine", "rtx309"), 2, "rtx3090-pcie4"),
        ((str(folder), "--vram", "much"), 2, "size 'much'"),
        ((str(folder), "--vram", "0B"), 2, "no memory"),
        ((str(folder), "--vram", "8GB", "--ram", "0B"), 2, "--ram 0B is no memory"),
        (("olmoe-1b-7b", "--machine", "rtx9999"), 2, "give the memory: --vram 12GB"),
        (("olmoe-1b-7b", "--vram", "8GB", "--disk", "1GB"), 4, "the disk has 953.7 MiB free"),
        ((str(folder), "--vram", "24GB", "--context", "0"), 2, "one token or more"),
        ((str(folder / "no"), "--vram", "24GB"), 2, "config.json"),
    ):
        assert main(["plan", *options]) == code
        assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("model", "vram", "widths"),
    [("gpt-oss-120b", "24GB", [0.6, 0.8, 1, 1.25]), ("qwen3-235b-a22b", "24GB", [])],
)
def test_every_expert_in_few_bits_beside_whole_ones(
    model: str, vram: str, widths: list[float], planned: Planned, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = planned(model, "--vram", vram)
    shape = model_shape(model)
    rows = plan["every_expert_in_few_bits"]
    room = plan["memory"]["experts_nbytes"]
    assert [row["bits"] for row in rows] == widths
    for row in rows:
        num_weights = shape.shape.nbytes / shape.weight_nbytes
        assert row["nbytes"] == pytest.approx(num_weights * row["bits"] / 8, rel=1e-4)
        assert (
            room - shape.shape.expert_nbytes
            < row["nbytes"] + row["share"] * shape.shape.nbytes
            <= room
        )
        assert plan["tokens_per_s"]["share"] < row["tokens_per_s"]
    assert main(["plan", model, "--vram", vram, "--details"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert ("predicted: nothing of this model was quantised" in said) == bool(widths)
    assert ("every expert at 0.6 bits would take 15.9 GiB, and 5.7 GiB are left" in said) == (
        not widths
    )
