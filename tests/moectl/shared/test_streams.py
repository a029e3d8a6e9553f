"""Streams that are closed, full or gone, and arguments in a locale that cannot read them."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.errors import BadInput
from moectl.cli import main
from moectl.generating.asking import asker
from moectl.shared.terminal import streams
from moectl.shared.terminal.exit_codes import exit_code_of
from moectl.show.render import show_json
from tests import ROOT

PREPARED = "import os, sys; from moectl.shared.terminal.streams import prepare_streams; prepare_streams(); "


def process(
    code: str, *arguments: str, redirected: str = "", **environment: str
) -> subprocess.CompletedProcess:
    """Python code after `prepare_streams`, with the streams as a shell redirects them."""
    command = [
        "sh",
        "-c",
        f'exec "$0" "$@" {redirected}',
        sys.executable,
        "-c",
        PREPARED + code,
        *arguments,
    ]
    options = {"cwd": ROOT, "capture_output": True, "env": os.environ | environment}
    return subprocess.run(command, preexec_fn=_hang_up_ends, **options)


def _hang_up_ends() -> None:
    """Undo what `nohup` does to the tests themselves."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_closed_streams_are_dev_null(tmp_path: Path) -> None:
    """Files that are opened later do not get their numbers, and print finds something to write
    to."""
    told = tmp_path / "told"
    code = (
        "print('a'); print('b', file=sys.stderr); sys.stdout.flush(); file = open(sys.argv[1], "
        "'w'); "
    )
    code += "file.write(f'{file.fileno() > 2} {sys.stdin}'); os.write(1, b'c'); os.write(2, b'd')"
    assert process(code, str(told), redirected="<&- >&- 2>&-").returncode == 0
    assert told.read_text() == "True None"


def test_text_of_an_ascii_locale_is_utf8() -> None:
    """Also the text that is printed; an option of Python's that insists on ASCII is no endless
    restart."""
    for given in ({"PYTHONUTF8": "0"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}):
        done = process("print(sys.argv[1])", "Zürich", LC_ALL="C", **given)
        assert (done.stdout.decode(), done.stderr) == ("Zürich\n", b"")
    assert process("print(sys.argv[1])", "Zürich", PYTHONIOENCODING="ascii").stdout == b"Z?rich\n"


def test_no_endless_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(streams.os, "execve", lambda *given: started.append(given))
    monkeypatch.setattr(streams.sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    streams.prepare_streams()
    [(program, arguments, environment)] = started
    assert (program, arguments[1:]) == (sys.executable, sys.orig_argv[1:]) and environment[
        "PYTHONUTF8"
    ] == "1"
    monkeypatch.setenv("PYTHONUTF8", "1")
    streams.prepare_streams()
    assert len(started) == 1


def test_a_terminal_that_goes_away_interrupts() -> None:
    code = "from moectl.shared.terminal.exit_codes import exit_code_of; import signal; "
    code += "sys.exit(exit_code_of(lambda: (os.kill(os.getpid(), signal.SIGHUP), signal.pause())))"
    done = process(code)
    assert (done.returncode, done.stderr) == (130, b"moectl: interrupted\n")


def test_output_that_is_lost_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(command: object) -> int:
        with Path("/dev/full").open("w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            return exit_code_of(command)

    def fails() -> None:
        print("half")
        raise BadInput("no model")

    for command, code, told in (
        (lambda: print("all"), 4, "stdout cannot be written: No space left on device"),
        (lambda: print("now", flush=True), 4, "stdout cannot be written: No space left on device"),
        (
            lambda: (print("end"), sys.exit(0)),
            4,
            "stdout cannot be written: No space left on device",
        ),
        (fails, 3, "no model"),
    ):
        assert ends(command) == code
        assert capsys.readouterr().err == f"moectl: {told}\n"


def test_a_chat_needs_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "--chat"]) == 2
    assert (
        capsys.readouterr().err
        == "moectl: a chat reads turns from stdin, which is closed: give --prompt TEXT\n"
    )
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO("Zürich".encode()), encoding="ascii")
    )
    with pytest.raises(BadInput, match="not text in ASCII: convert it, or set PYTHONIOENCODING"):
        asker(())()


def test_json_is_whole_where_stdout_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (
        ("ascii", b'{"text": "Z\\u00fcrich"}\n'),
        ("utf-8", '{"text": "Zürich"}\n'.encode()),
    ):
        written = io.BytesIO()
        monkeypatch.setattr(
            sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors="replace")
        )
        show_json({"text": "Zürich"})
        sys.stdout.flush()
        assert written.getvalue() == expected


def test_a_file_that_this_user_may_not_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    assert exit_code_of(refuse, typed=[]) == 3
    assert (
        capsys.readouterr().err
        == "moectl: /some/file: permission denied; give this user the right to use it\n"
    )
