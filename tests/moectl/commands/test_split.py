"""`moectl split`: what it prints and writes, and every kind of error."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from artifacts.hardware import profile as measured
from artifacts.hardware.profile import Compute, HardwareProfile, Load, NearCompute, Spread
from artifacts.shape import Shape
from artifacts.splits.solve import allocate
from artifacts.store.rows import curve_matrices, split_columns
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from artifacts.traces.curves import measure
from artifacts.traces.parquet import read_parquet, to_table, write_parquet
from artifacts.traces.trace import DECODE, PREFILL
from moectl.cli import main
from tests import TRACE

pytestmark = pytest.mark.slow

SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=1000)
MODEL = ModelInfo("small", "c" * 64, "olmoe", SHAPE)

Asked = Callable[..., dict]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "moe.duckdb"


@pytest.fixture
def asked(path: Path, capfd: pytest.CaptureFixture[str]) -> Asked:
    """`asked(*options)`: the JSON of the command, its store at `path`."""

    def run(*options: object) -> dict:
        capfd.readouterr()
        code = main(["split", *map(str, options), "--store", str(path), "--json"])
        said = capfd.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)

    return run


@pytest.fixture
def refused(path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`refused(*options)`: the exit code and the line on stderr."""

    def run(*options: object) -> tuple[int, str]:
        code = main(["split", *map(str, options), "--store", str(path)])
        said = capfd.readouterr()
        assert not said.out and said.err.count("\n") == 1
        return code, said.err

    return run


def spread(seconds: float) -> Spread:
    return Spread(seconds, seconds / 10, 9)


def hardware() -> HardwareProfile:
    compute = Compute(1, spread(0.3e-3), spread(1.2e-3), spread(0.5e-3), spread(0.3e-3))
    own = Load("pinned", spread(0.9e-3), 1.0, spread(0.7e-3), spread(0.05e-3), spread(0.1e-3))
    conditions = {
        "device": "cuda",
        "device_name": "small card",
        "processor": "x",
        "cores": 2,
        "link": "pinned",
    }
    near = (NearCompute(16, 1, spread(1e-3)),)
    return HardwareProfile((compute,), (own, Load("disk", spread(9e-3), 0.1)), near, conditions)


@pytest.fixture
def profiled(path: Path) -> Path:
    """A store with a model, its trace and its hardware profile."""
    trace = read_parquet(TRACE)
    profile = hardware()
    with Store.open(path) as store:
        store.add_model(MODEL)
        for command, parameters, tables in (
            ("observe", {}, {"traces": to_table(trace)}),
            (measured.COMMAND, profile.conditions, {"hardware": measured.to_rows(profile)}),
        ):
            store.write_run(
                RunInfo(command, MODEL.model_id, utc_now(), 0.0, parameters=parameters), tables
            )
    return path


def test_what_is_said_is_what_is_stored(asked: Asked, path: Path) -> None:
    how = ("--budget", "30.5x", "--solver", "greedy", "--eviction", "lcp:rho=0.5,uses=tokens")
    said = asked("--trace", TRACE, "--num-experts", 32, "--machine", "5gbps", *how)
    assert said["eviction"] == "lcp:rho=0.5,uses=tokens"
    with Store.open(path, read_only=True) as store:
        run = store.run(said["run"])
        curves = curve_matrices(store.read("curves", run.run_id), 8, 32)
        budgets, exposed, theta, cache_size = split_columns(store.read("splits", run.run_id))
    ours = measure(read_parquet(TRACE), SHAPE, phases=(DECODE,), rho=0.5, uses="tokens")
    for stored, curve in zip(curves, (ours.hit, ours.prediction, ours.prediction_hit), strict=True):
        np.testing.assert_array_equal(stored, curve)
    seconds = said["latencies"]
    window = seconds["head_s"] + seconds["attention_s"]
    times = window, seconds["moe_s"], seconds["attention_s"], seconds["load_s"]
    told = (curves[0], curves[1][:, :4], curves[2][:, :4])  # as many predictions as are prefetched
    again = allocate(30.5, 0.01, *times, 4, *told, latency_s=seconds["latency_s"])
    for stored, found in zip((budgets, exposed, theta, cache_size), again, strict=True):
        np.testing.assert_array_equal(stored, found)
    assert [layer["budget"] for layer in said["layers"]] == budgets.tolist()
    assert [layer["theta"] for layer in said["layers"]] == theta.tolist()
    assert said["exposed_ms"]["greedy"] == pytest.approx(exposed.sum() * 1e3)
    assert said["exposed_ms"].keys() == {"even", "greedy", "dynamic"}
    known = run.info.parameters
    assert (known["machine"], known["budget"], known["solver"], known["phases"]) == (
        "5gbps",
        "30.5x",
        "greedy",
        ["decode"],
    )
    assert known["shape"]["num_experts"] == 32 and run.info.model_id is None
    assert (run.info.data, run.info.data_digest) == (str(TRACE), read_parquet(TRACE).digest())


def test_trace_and_hardware_profile_of_the_store(asked: Asked, profiled: Path) -> None:
    said = asked()
    assert (said["hardware_run"], said["link"], said["hardware"]) == (
        2,
        "pinned",
        ["cuda", "small card", "x", 2],
    )
    assert "machine" not in said
    known = {"attention_s": 0.3e-3, "moe_s": 1.2e-3, "head_s": 0.5e-3}
    assert said["latencies"] == pytest.approx(
        known | {"load_s": 0.8e-3, "latency_s": 0.1e-3, "host_s": 0.05e-3}
    )
    assert (
        said["exposed_ms"]["dynamic"] < said["exposed_ms"]["greedy"] <= said["exposed_ms"]["even"]
    )
    assert (
        said["found_by"] in ("even", "greedy", "dynamic")
        and "the fastest of 7 by replay" in said["how"]
    )
    asked_again = asked("--link", "disk", "--solver", "dynamic")
    seconds = asked_again["latencies"]
    assert (seconds["load_s"], seconds["latency_s"], asked_again["how"]) == (
        0,
        9e-3,
        "solver dynamic",
    )
    with Store.open(profiled, read_only=True) as store:
        assert store.latest_run("split", MODEL.model_id).run_id == said["run"] + 1


def test_a_trace_of_a_folder_belongs_to_its_model(asked: Asked, path: Path) -> None:
    said = asked("--trace", TRACE, "--model", "bundled", "--machine", "5gbps", "--solver", "greedy")
    with Store.open(path, read_only=True) as store:
        [model] = store.models()
        assert store.run(said["run"]).info.model_id == model.model_id
    assert (model.shape.num_layers, model.shape.num_experts) == (8, 32)


def test_the_table_has_a_bar_for_each_layer(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [
        "--num-experts",
        "32",
        "--machine",
        "a6000-pcie4",
        "--store",
        str(path),
        "--solver",
        "greedy",
    ]
    assert main(["split", "--trace", str(TRACE), *options]) == 0
    said = capfd.readouterr().out
    bars = re.findall("[█░·]{32}", said)
    assert len(bars) == 8 and sum(bar.count("█") for bar in bars) == pytest.approx(64, abs=4)
    assert (
        "exposed a token: even" in said
        and "a6000-pcie4: attention" in said
        and "assumed: experts of" in said
    )


def test_a_trace_of_prompts_alone_is_counted_by_prompts(asked: Asked, tmp_path: Path) -> None:
    trace = read_parquet(TRACE)
    write_parquet(trace.take(np.flatnonzero(trace.phase == PREFILL)), tmp_path / "prompts.parquet")
    said = asked("--trace", tmp_path / "prompts.parquet", "--machine", "5gbps", "--num-experts", 32)
    assert said["phases"] == ["prefill"]


@pytest.mark.parametrize(
    "options", [("splits",), ("curves",), ("curves", "--layer", "2"), ("splits", "--heatmap")]
)
def test_what_is_stored_can_be_looked_at(
    asked: Asked, path: Path, options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also for a model of which only the shape is known."""
    asked("--trace", TRACE, "--num-experts", 32, "--machine", "5gbps", "--solver", "greedy")
    assert main(["inspect", *options, "--store", str(path)]) == 0
    said = capfd.readouterr().out
    assert {"splits": "theta", "curves": "cached"}[options[0]] in said.lower()
    assert main(["inspect", options[0], "--store", str(path), "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["rows"]) == 8


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--trace", TRACE, "--machine", "5gbs"), 2, "did you mean 5gbps"),
        (("--trace", TRACE, "--machine", "5gbps", "--link", "disk"), 2, "leave it out"),
        (
            ("--trace", TRACE, "--machine", "5gbps", "--solver", "dynamics"),
            2,
            "did you mean dynamic",
        ),
        (("--trace", TRACE, "--num-experts", 32, "--machine", "5gbps", "--zeta", 0), 2, "zeta"),
        (
            ("--trace", TRACE, "--num-experts", 32, "--machine", "5gbps", "--budget", "0x"),
            2,
            "above 0",
        ),
        (("--trace", TRACE, "--num-experts", 32), 5, "moectl profile --hardware"),
        (("--trace", TRACE, "--model", "mixtral-8x7b", "--machine", "5gbps"), 3, "selects expert"),
        ((), 2, "give --trace FILE"),
    ],
)
def test_what_cannot_be(
    refused: Callable, path: Path, options: tuple, code: int, said: str
) -> None:
    found, line = refused(*options)
    assert found == code and said in line
    assert not path.exists()


def test_a_trace_without_predictions_or_layers_is_refused(
    refused: Callable, tmp_path: Path
) -> None:
    trace = read_parquet(TRACE)
    write_parquet(replace(trace, predicted=None), tmp_path / "blind.parquet")
    code, line = refused(
        "--trace", tmp_path / "blind.parquet", "--num-experts", 32, "--machine", "5gbps"
    )
    assert code == 3 and "moectl profile --trace" in line
    write_parquet(trace.take(np.flatnonzero(trace.layer != 3)), tmp_path / "gap.parquet")
    code, line = refused(
        "--trace", tmp_path / "gap.parquet", "--num-experts", 32, "--machine", "5gbps"
    )
    assert code == 3 and "layers 3 never occur" in line


def test_a_solved_split_is_solved_anew_as_a_simulation_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = read_parquet(TRACE)
    short = tmp_path / "short.parquet"
    write_parquet(whole.take(np.flatnonzero((whole.request < 2) & (whole.token < 40))), short)
    asked = ["simulate", "--trace", str(short), "--num-experts", "32", "--reconfigure-every", "30"]
    assert main([*asked, "--preset", "moepic", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)["receipt"]["split"]
    assert said["every_tokens"] == 30 and said["solved_anew"] + said["could_not_tell"] == 1
    assert main(asked) == 2
    assert "follows a solved one" in capfd.readouterr().err
