"""Every command that the documents show runs, in the order shown, as a reader would type them, on less text.

Less: fewer tokens, a few of the questions and turns of each measurement, one request of the bundled trace, the
beginning of one text of the demo. `make demo` is the whole of it.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import compute, parquet

from moectl.bundled import bundled_trace, demo_model
from moectl.cli import main
from moectl.commands import demo, doctor_measured, hardware
from moectl.commands.reproduce import REPRODUCTIONS
from moectl.shared import trace_source
from profilers.compare import check_prediction as prediction
from profilers.compare import continuations, price_precision
from profilers.hardware.load_times import TimingEffort
from tests import ROOT

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if BLOCK.search(path.read_text()))
SET_UP = ("git clone", "cd ", "make ")  # what a test cannot do from inside itself; CI does it before
REPRODUCTION = "moectl simulate --reproduce "  # each runs once, in tests/moectl/reproductions/test_reproduce.py


def commands(page: Path) -> list[str]:
    lines = [line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture(autouse=True)
def quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = TimingEffort(lengths=(16,), turns=3)
    monkeypatch.setattr(hardware, "THOROUGH", little)
    monkeypatch.setattr(doctor_measured, "QUICK", little)
    monkeypatch.setattr(prediction, "_TIMES", 1)
    monkeypatch.setattr(demo, "_NUM_SEQUENCES", 1)
    monkeypatch.setattr(demo, "_DECODE", 8)
    monkeypatch.setattr(continuations, "COUNT", 3)
    monkeypatch.setattr(price_precision, "AVERAGES", (2.0,))

    def first_request(name: Path) -> Path | None:
        if (whole := bundled_trace(name)) is None:
            return None
        rows = parquet.read_table(whole)
        parquet.write_table(rows.filter(compute.equal(rows["request"], rows["request"][0])), tmp_path / "first.parquet")
        return tmp_path / "first.parquet"

    monkeypatch.setattr(trace_source, "bundled_trace", first_request)


@pytest.fixture(autouse=True)
def belongings(tmp_path: Path) -> None:
    """What first-steps says a reader brings along: a checkpoint, and text in files of two kinds."""
    (tmp_path / "my-model").symlink_to(demo_model(), target_is_directory=True)
    (tmp_path / "my-text").mkdir()
    pages = [path.read_text(encoding="utf-8") for path in PAGES]
    (tmp_path / "my-text" / "notes.txt").write_text(pages[0], encoding="utf-8")
    rows = (json.dumps({"title": text.splitlines()[0], "body": text}) for text in pages[1:5])
    (tmp_path / "my-text" / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")


def shorter(line: str) -> str:
    """A profile with a 32nd of the tokens, or 128; half of them in shards. A price with 32, a bench with one text of
    16. Replicas in this process: another takes longer to begin than it has to do. The demo, whose line names no
    number, with the least it takes."""
    if line.startswith("moectl bench"):
        return re.sub(r"--tokens \d+", "--tokens 16 --length 16", line)
    if line.startswith(("moectl profile", "moectl inspect")):
        share = 2 if "--shard" in line else 32
        least = 128 if line.startswith("moectl profile") else 32
        return re.sub(r"--tokens (\d+)", lambda found: f"--tokens {max(least, int(found[1]) // share)}", line)
    line = line.replace("moectl quantize", "moectl quantize --jobs 1")
    return line.replace("moectl demo", "moectl demo --tokens 1024")


@contextmanager
def taken_up(line: str, shared: Path) -> Iterator[None]:
    """`moectl quantize` goes on from what it left for another page, which is the same: it is what takes longest."""
    if not line.startswith("moectl quantize"):
        yield
        return
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other page may be another worker's
        if shared.exists():
            shutil.copytree(shared, "moe.duckdb.replicas")
        yield
        shutil.copytree("moe.duckdb.replicas", shared, dirs_exist_ok=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(
    page: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    of_session = tmp_path_factory.getbasetemp()
    of_session = of_session.parent if "PYTEST_XDIST_WORKER" in os.environ else of_session
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECTL_STORE", raising=False)
    for line in commands(page):
        if line.startswith((*SET_UP, REPRODUCTION)):
            continue
        program, *arguments = shlex.split(shorter(line))
        if program == "moectl" and "|" not in arguments:  # a process of its own would spend most of its time importing
            with taken_up(line, of_session / "replicas"):
                code, (out, err) = main(arguments), capfd.readouterr()
        else:
            code, out, err = in_a_shell(line)
        assert code == 0, f"{line}\n{err}"
        assert out.strip(), f"{line} printed nothing"


def in_a_shell(line: str) -> tuple[int, str, str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    line = re.sub(r"(^|\| )moectl ", rf"\1{shlex.quote(sys.executable)} -m moectl ", line)
    done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def test_reproductions_of_pages_are_known() -> None:
    lines = [line for page in PAGES for line in commands(page) if line.startswith(REPRODUCTION)]
    assert lines and {line.removeprefix(REPRODUCTION) for line in lines} <= REPRODUCTIONS.keys()


def test_the_documents_are_found() -> None:
    assert {"README", "running", "profile"} <= {page.stem for page in PAGES}
