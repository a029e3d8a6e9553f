"""Studies are part of a clone, not of what is installed."""

from pathlib import Path

import pytest

from moectl.cli import main
from moectl.shared import importing


@pytest.mark.parametrize(
    "command", ["inspect substitution", "inspect precision", "inspect prefetch", "fit-trace"]
)
def test_without_its_clone_moectl_says_how_to_get_a_study(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importing, "_ROOT", tmp_path)
    assert main(command.split()) == 2
    assert capfd.readouterr().err == (
        f"moectl: {command} runs from a clone: git clone moectl, and pip install -e . in its "
        "folder\n"
    )
