"""The command line keeps its contract: quick help, clean `--json`, exit codes, one line for every
error, no traceback.

What each command refuses, and with which line: tests/moectl, above all test_bad_input.py. Code 6:
test_19_workers.py.
"""

import errno
import json
import signal
import subprocess
import sys
import time

import pytest
from typer.main import get_command

from artifacts.errors import BadInput, BadUsage, Incompatible, OutOfResources, Partly, Problem
from moectl.cli import app, main
from moectl.shared.terminal.exit_codes import exit_code_of
from tests import ROOT
from tests.helpers.said import problems

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "duckdb", "numpy", "numba", "pyarrow", "datasets")
COMMANDS = list(get_command(app).commands)


def test_help_imports_nothing_heavy():
    """So that it takes less than half a second."""
    asked = [[], *([name] for name in COMMANDS)]
    code = (
        "import sys\n"
        "from moectl.cli import main\n"
        f"for asked in {asked!r}:\n"
        "    assert main([*asked, '--help']) == 0\n"
        f"    print('heavy:', asked, [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("heavy: ")]
    assert told == [f"heavy: {one} []" for one in asked], done.stderr


def test_version_and_no_arguments(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moectl ")
    assert main([]) == 2


@pytest.mark.parametrize(
    "arguments", [["inspct"], ["inspect", "--layr", "1"], ["inspect", "--layer", "x"]]
)
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
        (Partly("x y"), 6),
    ],
)
def test_a_problem_is_one_line_and_its_code(error, code, capsys):
    assert exit_code_of(raising(error)) == code
    said = capsys.readouterr()
    assert said.err == "moectl: x y\n" and not said.out


def test_every_kind_of_problem_has_a_code():
    assert all(
        exit_code_of(raising(kind("x"))) in (2, 3, 4, 5, 6) for kind in Problem.__subclasses__()
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (RuntimeError("Query interrupted"), 130),
        (MemoryError(), 4),
        (OSError(errno.EMFILE, "Too many open files"), 4),
        (RuntimeError("can't start new thread"), 4),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in [...]"), 4),
        (OSError(errno.ENOSPC, "No space left on device", "x.parquet"), 4),
        (ModuleNotFoundError("No module named 'duckdb'", name="duckdb"), 5),
        (SystemExit(6), 6),
        (SystemExit(), 0),
    ],
)
def test_other_ends(error, code, capsys):
    assert exit_code_of(raising(error)) == code
    assert capsys.readouterr().err.count("\n") == (0 if isinstance(error, SystemExit) else 1)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        OSError(errno.EIO, "broken"),
        KeyError("x"),
        ModuleNotFoundError("No module named 'moectl.nothing'", name="moectl.nothing"),
    ],
)
def test_a_bug_passes_through(error):
    with pytest.raises(type(error)):
        exit_code_of(raising(error))


def test_a_bug_is_1_with_a_traceback():
    code = (
        "from moectl.shared.terminal.exit_codes import exit_code_of; import sys; "
        "sys.exit(exit_code_of(lambda: 1 / 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["inspect", "policies"], ["inspect", "policies", "--json"], ["--help"]]
)
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
        "import sys, time\n"
        "from moectl import cli\n"
        "from moectl.commands.store import pack\n"
        "def wait():\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(30)\n"
        "pack.pack = wait\n"
        "sys.exit(cli.main(['pack']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"waiting\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert b"Traceback" not in process.stderr.read()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working folder, with a store that has a profile and a trace."""
    folder = tmp_path_factory.mktemp("contract")
    options = [
        "--tokens",
        "128",
        "--length",
        "64",
        "--trace",
        "--store",
        str(folder / "moe.duckdb"),
    ]
    assert main(["profile", *options]) == 0
    (folder / "routing.csv").write_text("layer_id,expert_ids\n0,3 1\n1,4 0\n")
    return folder


SYNTHETIC = ["--synthetic", "tokens=80,requests=2", "--model", "bundled"]
JSON = {
    "profile": ["--tokens", "128", "--length", "64", "--no-similarity", "--store", "other.duckdb"],
    "build-buddies": [],
    "build-maps": ["--tokens", "128", "--capacity", "20"],
    "split": [*SYNTHETIC, "--machine", "5gbps"],
    "fit-trace": ["--hits", "lru:64=0.5"],
    "import-trace": ["routing.csv", "--as", "csv"],
    "simulate": SYNTHETIC,
    "bench": [
        "--simulate",
        "--presets",
        "near",
        "--budgets",
        "25%",
        "--tokens",
        "64",
        "--length",
        "32",
    ],
    "plan": ["bundled", "--vram", "1100MB", "--machine", "rtx3090-pcie4", "--context", "64"],
    "run": ["--prompt", "def", "--greedy", "--max-new-tokens", "2"],
    "chat": ["--prompt", "def", "--greedy", "--max-new-tokens", "2"],
    "generate": ["--data", "routing.csv", "--out", "answers.jsonl", "--max-new-tokens", "2"],
    "inspect": ["runs"],
    "models": [],
    "report": ["page.html"],
    "export": ["--what", "placement", "--budget", "25%"],
}
ELSEWHERE = {
    "merge",
    "build-predictor",
    "quantize",
    "pack",
    "tune",
    "demo",
    "price",
    "doctor",
}  # asserted by their own tests


def test_every_command_that_has_json_is_tried():
    having = {
        name
        for name, command in get_command(app).commands.items()
        if "json" in {one.name for one in command.params}
    }
    assert having == JSON.keys() | ELSEWHERE


@pytest.mark.parametrize("command", JSON)
def test_json_is_one_object_and_nothing_else(command, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    capfd.readouterr()
    assert main([command, *JSON[command], "--json"]) == 0
    said = capfd.readouterr()
    assert isinstance(json.loads(said.out), dict) and said.out.endswith("}\n") and said.err == ""


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ["inspect", "runs"]),
        (2, ["inspect", "nothing"]),
        (2, ["run", "--prompt", "def", "--budget", "much"]),
        (3, ["run", "nowhere", "--prompt", "def"]),
        (3, ["simulate", "--trace", "nowhere.parquet"]),
        (3, ["profile", "--data", "nowhere.txt"]),
        (3, ["inspect", "runs", "--store", "nowhere.duckdb"]),
        (3, ["inspect", "activations", "--run", "99"]),
        (5, ["inspect", "replicas"]),
        (5, ["run", "--prompt", "def", "--preset", "shadow"]),
    ],
)
def test_exit_codes(code, arguments, folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert main(arguments) == code
    assert problems(capfd.readouterr().err).count("\n") == bool(code)
