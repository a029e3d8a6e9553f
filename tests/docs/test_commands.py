"""Every command that the documents show runs, in the order shown, as a reader would type them, on
less text.

The reader has installed moectl, stands in a folder of their own, and has nothing of the repository
on the path; only `python -m tools...` is typed in a clone, as the pages say. Less text: fewer
tokens, a few of the questions and turns of each measurement, one request of the bundled traces, the
beginning of one text of the demo. `make demo` is the whole of it. Blocks that take long are run by
`python -m tools.docs.walk`; here their options are read.
"""

import argparse
import fcntl
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.main import get_command

from moectl.bundled import demo_model
from moectl.cli import app
from tests import ROOT
from tests.helpers import gguf_files
from tests.helpers import hub as stand_in
from tests.helpers import stranger as stranger_module
from tests.helpers.hub import StandInHub
from tools.docs.commands import OF_A_CLONE, STAMP, Block, blocks, pages
from tools.reproductions.command import REPRODUCTIONS

pytestmark = pytest.mark.slow

PAGES = [page for page in pages() if any(not block.takes_long for block in blocks(page))]
LONG = [block for page in pages() for block in blocks(page) if block.takes_long]
SET_UP = (
    "git clone",
    "cd ",
    "make ",
)  # what a test cannot do from inside itself; CI does it before
QUIET = ("mkdir", "moectl serve")  # whose last word goes to stderr, or which say nothing
# each runs once, in tests/tools/reproductions/test_reproduce.py
REPRODUCTION = "moectl simulate --reproduce "


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page) if not block.takes_long for line in block.commands]


class Stranger:
    """The commands of a user, each in a process of its own, who downloads from `hub`."""

    def __init__(self, scratch: Path, hub: StandInHub) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MOECTL_STORE", "PYTHONPATH", "HF_HUB_OFFLINE")
        }
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(scratch / "huggingface")}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = environment
        self._scratch = scratch
        self._process = subprocess.Popen(
            [sys.executable, "-I", stranger_module.__file__, str(scratch)],
            cwd=scratch,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def runs(self, line: str, folder: Path) -> tuple[int, str, str]:
        """Run a line in `folder`. Return its exit code, what it printed and what it said."""
        program, *arguments = shlex.split(line)
        if program != "moectl" or {"|", "&&"} & {*arguments}:
            return self._in_a_shell(line, folder)
        out = self._scratch / "out"
        err = self._scratch / "err"
        err.unlink(missing_ok=True)  # what an earlier command said
        order = {"arguments": arguments, "folder": str(folder), "out": str(out), "err": str(err)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if arguments[0] == "serve":
            _until(err, " for clients, ")
            os.kill(pid, signal.SIGTERM)
        code = int(self._process.stdout.readline())
        return code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")

    def _in_a_shell(self, line: str, folder: Path) -> tuple[int, str, str]:
        place = _clone(folder / "clone") if OF_A_CLONE.search(line) else folder
        done = subprocess.run(
            line,
            shell=True,
            cwd=place,
            env=self.environment | {"XDG_DATA_HOME": str(folder / ".data")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def _clone(folder: Path) -> Path:
    """Return a folder that has what a clone has, uncommitted changes too."""
    if not folder.exists():
        folder.mkdir()
        for entry in ROOT.iterdir():
            if not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)
    return folder


def _until(path: Path, text: str, *, seconds: float = 120) -> None:
    """Wait until a file holds a text."""
    end = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text(encoding="utf-8"):
        assert time.monotonic() < end, f"{path} never held {text!r}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def hub() -> Iterator[StandInHub]:
    with stand_in.running() as running:
        running.add("allenai/OLMoE-1B-7B-0924", demo_model())
        yield running


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, hub: StandInHub) -> Iterator[Stranger]:
    one = Stranger(tmp_path_factory.mktemp("stranger"), hub)
    yield one
    one.close()


@pytest.fixture
def gguf_repository(hub: StandInHub, page: Path, tmp_path: Path) -> None:
    """A small model where the page with the downloads names one in GGUF."""
    if page.stem == "quickstart":
        folder = tmp_path / "of-the-hub"
        folder.mkdir()
        file = folder / "Qwen3-30B-A3B-Q4_K_M.gguf"
        gguf_files.write("qwen3_moe", file, gguf_files.every("Q8_0"))
        hub.add("unsloth/Qwen3-30B-A3B-GGUF", folder)


LESS = {
    "moectl quantize": "--jobs 1",
    "moectl demo": "--tokens 1024",
    "moectl tune": "--minutes 0.1 --tokens 64 --length 32 --rounds 1",
}


def shorter(line: str) -> str:
    """A profile with a 32nd of the tokens, or 128; half of them in shards. A price with 32, a bench
    with one text of 16 tokens. Replicas by the quick recipe, from little text and in this process:
    another takes longer to begin than it has to do. A server at any free port. A model in GGUF
    without kernels, which no other page has compiled."""
    if line.startswith("moectl bench"):
        return re.sub(r"--tokens \d+", "--tokens 16 --length 16", line)
    if line.startswith("moectl price"):
        return re.sub(r"--tokens \d+ --length \d+", "--tokens 32 --length 16", line)
    if line.startswith(("moectl profile", "moectl inspect")):
        share = 2 if "--shard" in line else 32
        least = 128 if line.startswith("moectl profile") else 32
        if "my-text" in line:
            least = 1024  # several requests, on which a search is checked
        return re.sub(
            r"--tokens (\d+)", lambda found: f"--tokens {max(least, int(found[1]) // share)}", line
        )
    if line.startswith("moectl serve"):
        return f"{line} --port 0"
    if ":Q4_K_M" in line:
        return f"{line} --experts exact"
    if line.startswith("moectl quantize"):
        line = re.sub(r" --samples \d+", "", line) + " --samples 8 --length 64"
        if "--recipe" not in line:
            line += " --recipe refined"
    for command, less in LESS.items():
        line = line.replace(command, f"{command} {less}")
    return line


@contextmanager
def taken_up(line: str, folder: Path, shared: Path) -> Iterator[None]:
    """Have `moectl quantize` go on from what it left for another page, which is the same: it is
    what takes longest."""
    if not line.startswith("moectl quantize"):
        yield
        return
    is_here = "--store" in line or (folder / "moe.duckdb").exists()
    replicas = (folder if is_here else folder / ".data" / "moectl") / "moe.duckdb.replicas"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other page may be another worker's
        if shared.exists() and not replicas.exists():
            shutil.copytree(shared, replicas)
        yield
        shutil.copytree(replicas, shared, dirs_exist_ok=True)


@pytest.mark.usefixtures("gguf_repository")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(
    page: Path, stranger: Stranger, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    of_session = tmp_path_factory.getbasetemp()
    of_session = of_session.parent if "PYTEST_XDIST_WORKER" in os.environ else of_session
    for line in commands(page):
        if line.startswith((*SET_UP, REPRODUCTION)):
            continue
        with taken_up(line, tmp_path, of_session / "replicas"):
            code, out, err = stranger.runs(shorter(line), tmp_path)
        assert code == 0, f"{line}\n{err}"
        assert out.strip() or line.startswith(QUIET), f"{line} printed nothing"


class Read(Exception):
    """The options of a command were read."""


@pytest.mark.parametrize("line", sorted({line for block in LONG for line in block.commands}))
def test_the_options_of_a_long_command_are_its_own(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo-fp8", "demo-mxfp4"):  # made by commands above those that name them
        (tmp_path / name).mkdir()
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    for program, *arguments in _between(words, "&&"):
        if program == "moectl":
            command = get_command(app).commands[arguments[0]]
            command.make_context(arguments[0], arguments[1:], resilient_parsing=False).close()
            continue
        assert program == "python"
        monkeypatch.setattr(sys, "argv", arguments[1:] if arguments[0] == "-m" else arguments)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", _parse_args)
        with pytest.raises(Read):
            if arguments[0] == "-m":
                runpy.run_module(arguments[1], run_name="__main__")
            else:
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


def _between(words: list[str], sign: str) -> Iterator[list[str]]:
    while sign in words:
        yield words[: words.index(sign)]
        words = words[words.index(sign) + 1 :]
    yield words


def _parse_args(parser: argparse.ArgumentParser, args: list[str] | None = None) -> None:
    _, unknown = parser.parse_known_args(args)
    raise Read if not unknown else AssertionError(unknown)


@pytest.mark.parametrize("block", LONG, ids=lambda block: f"{block.page.stem}: {block.commands[0]}")
def test_a_page_says_when_a_long_block_was_run(block: Block) -> None:
    assert STAMP.match(block.page.read_text(encoding="utf-8"), block.end)


def test_reproductions_of_pages_are_known() -> None:
    lines = [line for page in PAGES for line in commands(page) if line.startswith(REPRODUCTION)]
    assert lines and {line.removeprefix(REPRODUCTION) for line in lines} <= REPRODUCTIONS.keys()


def test_the_documents_are_found() -> None:
    assert {"README", "measure", "build"} <= {page.stem for page in PAGES}
