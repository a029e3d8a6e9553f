"""The checks for a GPU, tried on a CPU: they pass where the model is right, fail where it is not, and never crash."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tools import gpu_check, gpu_lowbit
from tools.gpu_checks import (
    RUNS,
    SMALL,
    Check,
    Said,
    attempt,
    bandwidth,
    compare,
    compared,
    exactness,
    save_random,
    session_speed,
    stock_speed,
)
from tools.gpu_replicas import FEW_BITS, few_bits

TINY = SMALL | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"), **TINY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_reports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", "--out", str(tmp_path / "report.json")])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 0
    assert "no GPU" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gpu"] is None and report["checks"] == []
    assert report["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_run_is_exact(folder: Path, dtype: torch.dtype) -> None:
    checks = [attempt(name, check) for name, check in exactness(lambda: folder, dtype, "cpu")]
    assert [check.name for check in checks] == list(RUNS)
    assert all(check.passed for check in checks), checks
    assert all(check.figures["bit_equal"] or "fused" in check.name for check in checks), checks


@pytest.mark.parametrize("run", FEW_BITS)
def test_runs_below_full_precision_say_what_the_plain_model_says(folder: Path, tmp_path: Path, run: str) -> None:
    check = attempt(run, lambda: few_bits(folder, tmp_path, "cpu", run))
    assert check.passed and "numba" in check.detail, check


def test_a_difference_fails_and_the_host_may_round_otherwise() -> None:
    theirs = Said((torch.tensor([1.0, 2.0]),), [3, 4])
    for difference, elsewhere, passes in ((0.0, False, True), (1e-4, False, False), (1e-4, True, True)):
        ours = Said((torch.tensor([1.0, 2.0 + difference]),), [3, 4])
        assert compare(ours, theirs, torch.float32, elsewhere=elsewhere)[0] == passes
    other = Said(theirs.logits, [3, 5])
    assert "DIFFER" in compare(other, theirs, torch.float32, elsewhere=True)[1]
    assert not compare(other, theirs, torch.bfloat16, elsewhere=False)[0]
    assert compare(other, theirs, torch.bfloat16, elsewhere=True)[0]


def test_a_check_that_cannot_run_fails_in_one_line() -> None:
    def check():
        raise ImportError("cannot import name 'x'\nfrom somewhere")

    assert attempt("x", check) == Check("x", False, "ImportError: cannot import name 'x'")


def test_speed_and_overlap_are_figures(folder: Path) -> None:
    checks = {"stock": attempt("stock", lambda: stock_speed(folder, "cpu", tokens=3))}
    assert set(checks["stock"].figures) == {"eager", "grouped_mm", "batched_mm"}
    for name in ("everything resident", "25%", "25%, prefetched"):
        checks[name] = attempt(name, lambda name=name: session_speed(folder, "cpu", name, tokens=3))
        assert checks[name].passed, checks[name].detail
    assert checks["25%"].figures["copy_ms_per_token"] > 0
    assert 0 <= checks["25%"].figures["hidden_share"] <= 1
    assert json.dumps(checks["25%"].figures)
    found = [attempt(name, check) for name, check in compared(checks)]
    assert [check.name for check in found] == ["overlap", "speed"]
    assert set(found[1].figures["ratios"]) == {"eager", "grouped_mm", "batched_mm"}
    assert bandwidth("cpu", nbytes=1 << 20)[2]["pinned_gbps"] > 0


def test_a_whole_run_tells_every_check(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu_check, "LARGE", TINY)
    monkeypatch.setattr(gpu_check, "SMALL", TINY)
    monkeypatch.setattr(gpu_check, "_bundled", lambda: folder)
    monkeypatch.setattr(gpu_lowbit, "MEASURED", (64, 128))
    monkeypatch.setattr(gpu_lowbit, "SHAPES", ((64, 96, 32),))
    monkeypatch.setattr(gpu_lowbit, "COLD_NBYTES", 1 << 16)
    checks = gpu_check.run(tmp_path, "cpu", Namespace(layers=2, tokens=2, threads=1))
    told = capsys.readouterr().out.splitlines()
    assert len(told) == len(checks) == 4 * len(RUNS) + 2 * 4 + len(FEW_BITS) + 5 + 2
    assert [line.startswith("passed") for line in told] == [check.passed for check in checks]
    assert all(check.passed for check in checks if check.name.startswith("exact"))
    assert all(check.passed for check in checks if check.name.startswith("replicas"))
    assert sum(check.name.startswith("exact: bundled model, bfloat16") for check in checks) == len(RUNS)


@pytest.mark.parametrize("bits", [1, 4])
def test_products_with_packed_weights_agree_and_are_measured(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lowbit, "MEASURED", (64, 128))
    found = attempt("exact", lambda: gpu_lowbit.agreement("cpu", bits))
    assert found.passed and "numba" in found.detail, found
    speed = attempt("speed", lambda: gpu_lowbit.speed("cpu", bits, nbytes=1 << 16, turns=1))
    assert speed.passed and speed.figures["1 tokens"]["ratio"] > 0, speed
    assert json.dumps([found.figures, speed.figures])


def test_a_product_that_differs_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import lowbit

    honest = lowbit.linear
    monkeypatch.setattr(lowbit, "linear", lambda x, packed: honest(x, packed) * 1.01)
    assert not attempt("exact", lambda: gpu_lowbit.agreement("cpu", 2)).passed
