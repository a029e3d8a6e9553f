"""`--help` at 80 columns, and command lines that are refused in one line."""

import shlex
import subprocess
import sys

import pytest
from typer.main import get_command

from moectl.cli import app, main
from moectl.cli.examples import EXAMPLES
from moectl.cli.panels import PANELS
from tests import ROOT

COMMANDS = list(get_command(app).commands)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_no_line_is_wider_than_the_terminal(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "…" not in said


def test_every_command_has_its_line_in_a_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    _, *panels = capsys.readouterr().out.split("╭─ ")
    titles = [panel.split()[0] for panel in panels]
    assert titles == ["Options", "Start", "Measure", "Build", "Store"]
    lines = [
        line.strip("│ ").split()[0]
        for panel in panels[1:]
        for line in panel.splitlines()[1:-1]
        if "│" in line
    ]
    assert lines == COMMANDS  # a line each, and none that goes on


def test_every_command_has_examples_that_it_can_read() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    commands = get_command(app).commands
    for name, examples in EXAMPLES.items():
        for example in examples:
            program, verb, *arguments = shlex.split(example.replace("MODEL", "bundled"))
            assert (program, verb) == ("moectl", name)
            commands[name].make_context(name, arguments)
        assert len(examples) > 1


@pytest.mark.parametrize("command", ["run", "plan", "advise", "simulate"])
def test_a_model_may_be_named_as_for_llama_cpp(command: str) -> None:
    named = get_command(app).commands[command].make_context(command, ["-m", "gpt-oss-20b"])
    assert named.params["model"] == "gpt-oss-20b"


def test_options_stand_in_panels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    _, *panels = capsys.readouterr().out.split("╭─ ")
    titles = [panel.partition(" ─")[0] for panel in panels]
    assert titles == ["Arguments", "Options", *(title for title in PANELS if title != "Server")]
    # the store, help
    assert "--link" in panels[titles.index("Memory and link")] and panels[1].count("--") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'? (see `moectl --help`)"),
        (["merge"], "Missing argument 'shards' (see `moectl merge --help`)"),
        (["run", "--promt", "x"], "No such option: --promt (Possible options: "),
        (["run", "--prompt"], "Option '--prompt' requires an argument (see `moectl --help`)"),
        (["run", "--threads", "0"], "Invalid value for '--threads': "),
    ],
)
def test_a_usage_error_is_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"moectl: {told}") and said.err.count("\n") == 1 and not said.out


def test_wrong_names_are_refused_before_torch_is_imported() -> None:
    wrong = [
        ["rnu"],
        ["inspect", "preset"],
        ["inspect", "presets", "budymoe"],
        ["run", "my-modle", "--prompt", "x"],
        ["run", "--prompt", "x", "--preset", "horizn"],
        ["run", "--prompt", "x", "--eviction", "lfru"],
        ["run", "--prompt", "x", "--scaled-to", "rtx309"],
        ["serve", "--preset", "horizn"],
        ["tune", "--scaled-to", "rtx309"],
        ["bench", "--presets", "near,horizn"],
    ]
    code = (
        "import sys\nfrom moectl.cli import main\n"
        f"assert {{main(wrong) for wrong in {wrong!r}}} == {{2, 3}}\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
    lines = done.stderr.splitlines()
    assert (
        len(lines) == len(wrong) and sum("id you mean" in line for line in lines) == len(wrong) - 1
    ), lines


def test_a_command_that_fails_on_import_is_not_called_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr("moectl.cli.import_module", lacking)
    with pytest.raises(KeyError, match=r"moectl\.commands\.store\.merge"):
        main(["merge", "--help"])
