"""`moectl bench` refuses bad options and data with one line."""

from pathlib import Path

import pytest

from moectl.bench.request import FIXED, BenchRequest
from moectl.cli import main
from tests.helpers.bench import LIVE, TRACE
from tests.helpers.said import problems


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tasks", "sums"], "unknown task 'sums'"),
        (["--tasks", "continuations,"], "empty name"),
        (["--tasks", "continuations", "--simulate"], "evaluated live"),
        (["--batch", "8"], "--batch is of --tasks"),
        (["--draft", "ngram", "--simulate"], "--draft is of a live bench"),
        (["--draft", "ngrm"], "unknown drafter 'ngrm'"),
        (["--clients", "8"], "--clients is of --simulate"),
        (["--kv-cache-dtype", "int8", "--simulate"], "--kv-cache-dtype is of a live bench"),
        (["--activations", "8"], "--activations 8 is of compiled kernels: give --experts fused"),
        (["--kv-cache-dtype", "int3"], "unknown type of keys and values 'int3'"),
    ],
)
def test_tasks_that_cannot_be(
    options: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert told in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--presets", "nearr"], "did you mean near"),
        (["--presets", "near,,full"], "empty name"),
        (["--presets", "buddymoe:rh=3"], "unknown parameter of buddymoe 'rh'; did you mean rho?"),
        (["--presets", "buddymo:rho=3"], "did you mean buddymoe"),
        (["--budgets", "a lot"], "budget 'a lot' is not understood"),
        (["--links", "fast"], "rate 'fast' is not understood"),
        (["--links", "cuda"], "needs the model on a CUDA device"),
        (["--scaled-to", "toaster"], "unknown machine 'toaster'"),
        (["--scaled-to", "a100-pcie4", "--links", "5GB/s"], "leave out --links"),
        (["--trace", TRACE], "are of a simulated bench"),
        (["--simulate", "--scaled-to", "a100-pcie4"], "give --machine"),
        (["--simulate", "--links", "disk"], "rate 'disk' is not understood"),
        (["--simulate", "--machine", "toaster"], "unknown machine 'toaster'"),
        (["--length", "50"], "no sequence of --length 50"),
    ],
)
def test_usage(
    options: list[str], says: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", model, *LIVE, *options]) == 2
    said = capfd.readouterr()
    assert says in said.err and problems(said.err).count("\n") == 1 and not said.out
    assert not Path("moe.duckdb").exists()


def test_data(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("short.txt").write_text("a dog")
    for data, says in (
        ("nowhere.txt", "no data at 'nowhere.txt'"),
        ("short.txt", "no document of 12 tokens"),
    ):
        assert main(["bench", model, *LIVE, "--data", data]) == 3
        assert says in capfd.readouterr().err
    assert not Path("moe.duckdb").exists()


def test_peers_that_are_not_known(capfd: pytest.CaptureFixture[str]) -> None:
    for options, told in (
        (["--peers", "vllm"], "transformers-eager"),
        (["--simulate", "--peers", "all"], "live"),
    ):
        assert main(["bench", *options]) == 2
        assert told in capfd.readouterr().err


def test_a_preset_that_substitutes_stands_beside_its_random_control() -> None:
    assert BenchRequest(presets="buddymoe,near").preset_names == [
        *FIXED,
        "buddymoe",
        "buddymoe-random",
    ]
    changed = BenchRequest(presets="buddymoe:rho=3,over=token,near")
    assert changed.preset_names == [*FIXED, "buddymoe:rho=3,over=token"]
