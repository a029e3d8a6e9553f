"""A command of moectl as a function."""

import json
from collections.abc import Callable

import pytest

from moectl.cli import main

Said = Callable[..., dict]


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    """`said(command, *options)`: the JSON of a command that succeeds and prints nothing on stderr."""

    def run(*options: str) -> dict:
        capfd.readouterr()
        code = main([*options, "--json"])
        printed = capfd.readouterr()
        assert (code, printed.err) == (0, "")
        return json.loads(printed.out)

    return run
