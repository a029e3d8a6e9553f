"""What is said while a model loads: a line without a terminal, a spinner that goes away on one."""

import pytest
from rich.console import Console

from artifacts.errors import BadInput
from moectl.bundled import demo_model
from moectl.shared.terminal import waiting as module
from moectl.shared.terminal.waiting import Waiting
from moectl.show.waiting import loading, reading
from runtime.model.files.read_bytes import READ


def test_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with loading(None, preset="auto", budget="25%") as waiting:
        assert 0 <= waiting.end() <= waiting.end()
    assert capsys.readouterr() == (
        "",
        "Loading the bundled model: 7.7 MiB, preset auto, budget 25%\n",
    )
    loading(None, preset="auto", budget="25%", is_quiet=True).end()
    assert capsys.readouterr() == ("", "")


def test_a_name_that_is_no_models_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE is set"):
        loading("some/model", preset="auto", budget="25%")
    with pytest.raises(BadInput, match=r"a hub id is owner/name"):
        loading("no-hub-id", preset="auto", budget="25%")
    assert not capsys.readouterr().err


def test_a_spinner_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_terminal(monkeypatch)
    with Waiting("Loading x", is_quiet=True):
        pass
    said = capsys.readouterr().err
    assert "Loading x" in said and said.endswith("\x1b[1A\x1b[2K")  # the line is taken away


def test_a_terminal_shows_the_bytes_read_since(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading(str(demo_model())).end()
    assert not capsys.readouterr().err, "nothing without a terminal"
    _on_terminal(monkeypatch)
    READ.add(1 << 40)
    with Waiting("Loading x", nbytes=13 << 30):
        READ.add(1 << 30)
    assert "1.0/13.0 GiB" in capsys.readouterr().err
    came = [1 << 30]
    with Waiting("Downloading x", nbytes=13 << 30, done=lambda: came[-1]):
        came.append(3 << 30)
    assert "2.0/13.0 GiB" in capsys.readouterr().err


def _on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def console(**options: object) -> Console:
        return Console(force_terminal=True, width=100, **options)

    monkeypatch.setattr(module, "Console", console)
