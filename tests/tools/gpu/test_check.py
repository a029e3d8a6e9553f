"""The checks for a GPU, tried on a CPU: they pass where the model is right, fail where it is not,
and never crash."""

import contextlib
import io
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from artifacts.quantisation.widths import SCALAR_WIDTHS
from tools.gpu import check as gpu_check
from tools.gpu.check import GROUPS
from tools.gpu.checks import low_bit
from tools.gpu.checks.exactness import Said, compare, compare_rounded, runs_on
from tools.gpu.checks.replicas import FEW_BITS
from tools.gpu.checks.sessions import SMALL, Check, attempt, bandwidth, save_random

pytestmark = pytest.mark.slow

TINY = SMALL | {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "vocab_size": 96,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"), **TINY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_reports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", "--out", str(tmp_path / "report.json")])
    gpu_check.main()
    assert "no GPU" in capsys.readouterr().out
    (line,) = (tmp_path / "report.json").read_text().splitlines()
    report = json.loads(line)
    assert report["gpu"] is None
    assert report["versions"]["torch"] == torch.__version__


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> tuple[dict[str, Check], list[str]]:
    """A whole run on a CPU, by name, and what it told."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(told):
        patch.setattr(gpu_check, "LARGE", TINY)
        patch.setattr(gpu_check, "SMALL", TINY)
        patch.setattr(gpu_check, "_bundled", lambda: folder)
        patch.setattr(low_bit, "MEASURED", (64, 128))
        patch.setattr(low_bit, "SHAPES", ((64, 96, 32),))
        patch.setattr(low_bit, "COLD_NBYTES", 1 << 16)
        options = Namespace(layers=2, tokens=3, threads=1)
        scratch = tmp_path_factory.mktemp("run")
        here = [group for group in GROUPS.values() if not group.needs_gpu]
        checks = [
            one
            for group in here
            for one in gpu_check._attempts(group.checks(scratch, "cpu", options))
        ]
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}, told.getvalue().splitlines()


def test_a_whole_run_tells_every_check(ran: tuple) -> None:
    checks, told = ran
    told = [line for line in told if line.startswith(("passed", "FAILED"))]
    assert (
        len(told)
        == len(checks)
        == 4 * len(runs_on("cpu")) + 2 * len(SCALAR_WIDTHS) + len(FEW_BITS) + 6 + 2 + 2
    )
    assert [line.startswith("passed") for line in told] == [
        check.passed for check in checks.values()
    ]
    assert sum(name.startswith("exact: bundled model, bfloat16") for name in checks) == len(
        runs_on("cpu")
    )
    assert json.dumps([check.figures for check in checks.values()])


def test_every_run_is_exact(ran: tuple) -> None:
    exact = [check for name, check in ran[0].items() if name.startswith("exact")]
    assert all(check.passed for check in exact), exact
    assert all(check.figures["bit_equal"] or "fused" in check.name for check in exact), exact


def test_replicas_of_every_width_and_runs_on_them_pass(ran: tuple) -> None:
    """By numba, whose products these are on a CPU."""
    found = {name: check for name, check in ran[0].items() if name.startswith("replicas")}
    assert all(check.passed for check in found.values()), found
    for name in (*FEW_BITS, *(f"{bits} bits, exact" for bits in SCALAR_WIDTHS)):
        assert "numba" in found[f"replicas: {name}"].detail
    assert found["replicas: 4 bits, speed"].figures["1 tokens"]["ratio"] > 0


def test_speed_and_overlap_are_figures(ran: tuple) -> None:
    checks = ran[0]
    assert set(checks["speed, stock"].figures) == {"eager", "grouped_mm", "batched_mm"}
    on_demand = checks["speed, 25%"].figures
    assert on_demand["copy_ms_per_token"] > 0 and 0 <= on_demand["hidden_share"] <= 1
    assert {"overlap", "speed"} <= set(checks)
    assert set(checks["speed"].figures["ratios"]) == {"eager", "grouped_mm", "batched_mm"}
    assert bandwidth("cpu", nbytes=1 << 20)[2]["pinned_gbps"] > 0


def test_a_difference_fails_and_the_host_may_round_otherwise() -> None:
    theirs = Said((torch.tensor([1.0, 2.0]),), [3, 4])
    for difference, allowed, passes in ((0.0, None, True), (1e-4, None, False), (1e-4, 1e-4, True)):
        ours = Said((torch.tensor([1.0, 2.0 + difference]),), [3, 4])
        assert compare(ours, theirs, torch.float32, allowed=allowed)[0] == passes
    other = Said(theirs.logits, [3, 5])
    assert "DIFFER" in compare(other, theirs, torch.float32, allowed=1e-4)[1]
    assert not compare(other, theirs, torch.bfloat16)[0]


def test_in_bfloat16_kernels_may_differ_as_far_as_bfloat16_itself() -> None:
    """The cut bundled model lies 0.07 from plain bfloat16 and 0.03 from float32: it is the better
    one of both."""

    def said(logit: float) -> Said:
        return Said((torch.tensor([1.0, logit]),), [3])

    exact = said(10.0)
    theirs = said(10.7)
    assert (
        compare_rounded(said(9.7), theirs, exact)[0]
        and compare_rounded(said(11.0), theirs, exact)[0]
    )
    assert not compare_rounded(said(11.2), theirs, exact)[0]
    assert not compare_rounded(said(10.6), exact, exact)[0]


def test_a_check_that_cannot_run_fails_in_one_line() -> None:
    def check():
        raise ImportError("cannot import name 'x'\nfrom somewhere")

    assert attempt("x", check) == Check("x", False, "ImportError: cannot import name 'x'")


def test_a_product_that_differs_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.kernels import low_bit as lowbit

    monkeypatch.setattr(low_bit, "SHAPES", ((64, 96, 32),))
    assert attempt("exact", lambda: low_bit.agreement("cpu", 2)).passed
    honest = lowbit.linear
    monkeypatch.setattr(lowbit, "linear", lambda x, packed: honest(x, packed) * 1.01)
    assert not attempt("exact", lambda: low_bit.agreement("cpu", 2)).passed
