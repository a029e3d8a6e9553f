"""The phases of a long command are told as they begin, and their seconds kept."""

import pytest

from moectl.shared import progress
from moectl.shared.progress import Phases


def test_phases_are_told_when_they_begin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter((10.0, 10.0, 12.5, 12.5, 20.0, 20.0))
    monkeypatch.setattr(progress, "perf_counter", lambda: next(now))
    phases = Phases()
    phases.begin("opening")
    phases.begin("reading")
    assert capsys.readouterr().err.splitlines() == ["     0 s  opening", "     2 s  reading"]
    assert phases.seconds() == {"opening": 2.5, "reading": 7.5}
    assert phases.elapsed_s == 10.0


def test_quiet_phases_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    phases = Phases(is_quiet=True)
    assert phases.elapsed_s == 0.0 and phases.seconds() == {}
    phases.begin("opening")
    assert phases.seconds().keys() == {"opening"} and capsys.readouterr().err == ""
