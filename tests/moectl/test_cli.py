"""The contract of the command line: quick help, exit codes, one line for every error."""

import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from artifacts.errors import BadInput, BadUsage, Incompatible, OutOfResources, Problem
from moectl.cli import app, main
from moectl.errors import exit_code_of

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "duckdb", "numpy", "numba", "pyarrow", "datasets")
COMMANDS = [command.name for command in app.registered_commands]


def moectl(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "moectl", *arguments], cwd=ROOT, capture_output=True, text=True, **options
    )


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from moectl.cli import main\n"
        f"assert main({[*arguments, '--help']!r}) == 0\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


def test_version_and_no_arguments(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moectl ")
    assert main([]) == 2


@pytest.mark.parametrize("arguments", [["inspct"], ["inspect", "--layr", "1"], ["inspect", "--layer", "x"]])
def test_a_usage_error_is_2_and_says_where_help_is(arguments, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert "--help" in said.err and not said.out


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadUsage("x\ny"), 2),
        (BadInput("x y"), 3),
        (OutOfResources("x y"), 4),
        (Incompatible("x y"), 5),
    ],
)
def test_a_problem_is_one_line_and_its_code(error, code, capsys):
    assert exit_code_of(raising(error)) == code
    said = capsys.readouterr()
    assert said.err == "moectl: x y\n" and not said.out


def test_every_kind_of_problem_has_a_code():
    assert all(exit_code_of(raising(kind("x"))) in (2, 3, 4, 5) for kind in Problem.__subclasses__())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (RuntimeError("Query interrupted"), 130),
        (MemoryError(), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x.parquet"), 4),
        (SystemExit(6), 6),
        (SystemExit(), 0),
    ],
)
def test_other_ends(error, code, capsys):
    assert exit_code_of(raising(error)) == code
    assert capsys.readouterr().err.count("\n") == (0 if isinstance(error, SystemExit) else 1)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.EIO, "broken"), KeyError("x")])
def test_a_bug_passes_through(error):
    with pytest.raises(type(error)):
        exit_code_of(raising(error))


def test_a_bug_is_1_with_a_traceback():
    code = "from moectl import cli, errors; import sys; sys.exit(errors.exit_code_of(lambda: 1 / 0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("arguments", [["inspect", "policies"], ["inspect", "policies", "--json"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "moectl", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_ctrl_c_is_130():
    code = (
        "import sys, time, typer\n"
        "from moectl import cli\n"
        "@cli.app.command('wait')\n"
        "def wait():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(30)\n"
        "sys.exit(cli.main(['wait']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"waiting\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert b"Traceback" not in process.stderr.read()
