"""Executors of the command line: unknown ones, a cluster out of reach, a missing package."""

import sys
from pathlib import Path

import pytest

from artifacts.errors import BadUsage, OutOfResources
from moectl.cli import main
from profilers.workers.choose import executing


@pytest.mark.parametrize("executor", ["slurm", "ray:", "rays", "ray:here"])
@pytest.mark.parametrize("command", ["quantize", "profile", "bench --simulate"])
def test_what_is_no_executor_is_refused(
    command: str, executor: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--executor", executor]) == 2
    assert "give local, ray, ray:auto or ray:HOST:PORT" in capfd.readouterr().err


def test_a_live_bench_takes_one_setting_after_another(capfd: pytest.CaptureFixture[str]) -> None:
    for option in (["--jobs", "2"], ["--executor", "ray"]):
        assert main(["bench", *option]) == 2
        assert "--jobs and --executor are of --simulate" in capfd.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379"])
def test_a_cluster_that_is_not_there_is_said_at_once(address: str) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'moectl[ray]'")
    with pytest.raises(
        OutOfResources, match=f"no Ray cluster at {address} .*: `ray start --head` begins one"
    ):
        executing(f"ray:{address}", None).__enter__()


def test_a_cluster_that_cannot_begin_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's sockets are in its folder, and their paths must be short."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'moectl[ray]'")
    (folder := tmp_path / ("long" * 20)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(
        OutOfResources, match="Ray cannot begin a cluster here .*: --executor local does without"
    ):
        executing("ray", 1).__enter__()
    assert not [*folder.iterdir()]


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "profilers.workers.ray", raising=False)
    with pytest.raises(BadUsage, match=r"needs ray: pip install 'moectl\[ray\]'"):
        executing("ray", None).__enter__()
