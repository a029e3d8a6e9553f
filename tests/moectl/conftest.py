"""A command of moectl as a function."""

import json
from collections.abc import Callable
from math import inf

import pytest

from moectl.cli import main
from moectl.shared.terminal import progress

Said = Callable[..., dict]


@pytest.fixture(autouse=True)
def however_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine gets no lines of progress, which would be on stderr."""
    monkeypatch.setattr(progress, "EVERY_S", inf)
    monkeypatch.setattr(progress, "WAIT_S", inf)


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    """`said(command, *options)`: the JSON of a command that succeeds and prints nothing on
    stderr."""

    def run(*options: str) -> dict:
        capfd.readouterr()
        code = main([*options, "--json"])
        printed = capfd.readouterr()
        assert (code, printed.err) == (0, "")
        return json.loads(printed.out)

    return run
