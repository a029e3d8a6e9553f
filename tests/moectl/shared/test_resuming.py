"""Ctrl-C says what is kept, and the command that goes on."""

from collections.abc import Callable

import pytest
import typer

from moectl.cli import main
from moectl.shared.terminal.exit_codes import exit_code_of
from moectl.shared.terminal.resuming import resumable
from profilers.routing import shards


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Query interrupted")])
@pytest.mark.parametrize("by_typer", [True, False])
@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (
            "samples are kept",
            "moectl: interrupted: samples are kept; to go on: moectl bench 'my model'\n",
        ),
        ("", "moectl: interrupted: nothing is kept\n"),
    ],
)
def test_the_last_line(
    error: BaseException, by_typer: bool, kept: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @resumable(kept)
    def bench() -> None:
        resumable()(raising)(error)  # work within other work: the whole is what a user typed

    app = typer.Typer()
    app.command()(bench)
    run: Callable[[], object] = (lambda: app(args=[])) if by_typer else bench
    assert exit_code_of(run, typed=["bench", "my model"]) == 130
    assert capsys.readouterr() == ("", said)


def test_the_whole_way_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @resumable("samples are kept")
    def merged(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "merge_shards", merged)
    assert main(["merge", "a.duckdb"]) == 130
    assert (
        capsys.readouterr().err
        == "moectl: interrupted: samples are kept; to go on: moectl merge a.duckdb\n"
    )


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="bug"), resumable("samples are kept"):
        raise RuntimeError("bug")
