"""Phases are numbered and told as they begin, their seconds kept, their time shared out; one line
shows all of it."""

import io
import sys
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from moectl.shared.terminal import progress
from moectl.shared.terminal.progress import Phases, progress_bar


@pytest.fixture
def pass_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`pass_s(seconds)` lets time pass, which stands still otherwise."""
    now = [10.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    return after


def test_phases_are_told_when_they_begin(
    pass_s: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with Phases(1, 3, 1, at_once=True) as phases:
        phases.begin("opening")
        pass_s(2.5)
        phases.begin("reading 8 texts")
        pass_s(7.5)
        assert phases.elapsed_s == 10.0
    assert capsys.readouterr().err.splitlines() == [
        "     0 s  1/3 opening",
        "     2 s  2/3 reading 8 texts",
    ]
    assert phases.seconds() == {"opening": 2.5, "reading 8 texts": 7.5}


def test_only_what_lasts_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = threading.Event()
    monkeypatch.setattr(progress, "WAIT_S", 0.05)
    with Phases(1, 1, 1) as phases:
        monkeypatch.setattr(
            phases, "_tell", lambda label, at_s: (told.set(), print(label, file=sys.stderr))
        )
        phases.begin("opening")
        phases.begin("reading")
        assert told.wait(10)
        phases.begin("ending")
    time.sleep(0.1)
    assert capsys.readouterr().err == "2/3 reading\n"


def test_quiet_phases_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(1, 1, is_quiet=True) as phases:
        assert phases.elapsed_s == 0.0 and phases.seconds() == {}
        phases.begin("opening")
    assert phases.seconds().keys() == {"opening"} and capsys.readouterr().err == ""


def test_the_time_left_is_that_of_the_whole(pass_s: Callable[[float], None]) -> None:
    with Phases(1, 3, is_quiet=True) as phases:
        phases.begin("opening")
        assert phases.left == ""
        pass_s(10)
        advance = phases.begin("reading")
        assert (phases.done, phases.left) == (0.25, "about 30 s left")
        pass_s(10)
        advance(1, 3)
        assert (phases.done, phases.left) == (0.5, "about 20 s left")
        pass_s(180)
        assert phases.left == "about 3 min left"


def test_a_limit_is_shared_out(pass_s: Callable[[float], None]) -> None:
    with Phases(1, 1, 2, limit_s=40, is_quiet=True) as phases:
        for name, ends_s in (("opening", 10), ("searching", 20), ("measuring", 40)):
            phases.begin(name)
            assert phases.left_s == ends_s - phases.elapsed_s and not phases.is_late()
            pass_s(9)
        assert phases.left == "about 13 s left"
        pass_s(14)
        assert phases.is_late() and phases.left == "about 0 s left"
    assert not Phases(1, 1).is_late()


def test_a_bar_within_a_phase_moves_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(1, 1, 2, at_once=True) as phases:
        phases.begin("recording")
        with progress_bar("reading", unit="tokens") as advance:
            advance(1, 2)
        assert phases.done == 0.125
    assert capsys.readouterr().err.splitlines() == ["     0 s  1/3 recording"]


def test_phases_within_a_phase_move_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Phases(1, 1, 2, at_once=True) as phases:
        phases.begin("profiling")
        phases.begin("quantising")
        with Phases(1, 1, 2, at_once=True) as inner:
            inner.begin("opening")
            inner.begin("reading")(1, 2)
            assert (inner.done, phases.done) == (0.375, 0.34375)
        with progress_bar("packing", unit="files") as advance:
            advance(1, 1)
        assert phases.done == 0.5
    assert capsys.readouterr().err.splitlines() == [
        "     0 s  1/3 profiling",
        "     0 s  2/3 quantising",
    ]


def test_a_bar_alone_says_a_line_a_minute(
    pass_s: Callable[[float], None], capsys, monkeypatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    with progress_bar("packing", unit="files") as advance:
        for done in range(1, 9):
            pass_s(20)
            advance(done, 8)
    assert capsys.readouterr().err.splitlines() == [
        "    60 s  packing files: 38%, about 2 min left",
        "   120 s  packing files: 75%, about 40 s left",
    ]


def test_a_terminal_has_one_line(
    monkeypatch: pytest.MonkeyPatch, pass_s: Callable[[float], None]
) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    with Phases(1, 3) as phases:
        phases.begin("opening the model")
        pass_s(10)
        phases.begin("simulating 31 candidates")
        phases._bar.refresh()
    assert (
        "2/2 simulating 31 candidates" in drawn.getvalue() and "about 30 s left" in drawn.getvalue()
    )
    assert "\n" not in drawn.getvalue().rstrip().rpartition("about 30 s left")[0]
