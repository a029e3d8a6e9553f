"""Commands of moectl in child processes that are killed or run out of disk, and checks of what they
wrote.

A child is forked from a process with all imports done, so that it starts at once.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from artifacts.errors import Problem
from artifacts.store.check import check_store
from artifacts.store.leftovers import StoreFinding
from artifacts.store.runs import StoredRun
from artifacts.store.store import Store
from tools.docs.rooms import imports, modules
from tools.torments.cases import Lost
from tools.torments.content_hash import content_hash
from tools.torments.victim_commands import BEFORE, COMMANDS, NEW_FOLDER, TIMED, outputs

SLOWEST_S = 120.0  # a command; they take two seconds on a quiet machine
_WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "an",
    "old",
    "dog",
    "by",
    "the",
    "gate",
    "all",
    "day",
)
# Calls that may change files: a process killed there is the most likely to leave something half
# done.
_EVENTS = frozenset(
    (
        "execute",
        "commit",
        "begin",
        "close",
        "write",
        "tofile",
        "fsync",
        "replace",
        "rename",
        "unlink",
        "link",
        "mkdir",
    )
    + ("rmdir", "open", "read", "preadv", "flock", "dumps")
)

Runs = frozenset[tuple[str, str]]  # command or output, and content of each


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a command: `code` as in `subprocess`, its stderr, and the number of its events."""

    code: int
    said: str
    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Death:
    """SIGKILL `after_s`, counted from the event of this number if there is one, else from the
    start."""

    after_s: float
    event: int | None = None


class Victims:
    """A model, a text, a store with earlier runs, and what each command adds to it."""

    def __init__(self, ground: Path) -> None:
        self._ground = ground
        self._context = multiprocessing.get_context("forkserver")
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._context.set_forkserver_preload([__name__, *_modules()])
        self._make()
        self._known: dict[tuple[str, bool, int], tuple[Runs, Ended]] = {}
        self.with_runs = ground / "with"
        self.without = ground / "without"
        for folder in (self.with_runs, self.without):
            folder.mkdir()
        for command in BEFORE:
            self._whole(command, self.with_runs)

    def start(
        self,
        command: str,
        folder: Path,
        death: Death | None = None,
        *,
        longest_file: int | None = None,
    ) -> "Child":
        """Start a command on the store of a folder; no file it writes can be longer than
        `longest_file` bytes."""
        return Child(
            self._context, ((COMMANDS | BEFORE)[command], self._ground, folder, death, longest_file)
        )

    def known(self, command: str, *, has_runs: bool, times: int = 1) -> tuple[Runs, Ended]:
        """All runs after this many undisturbed executions of the command, and how the last one
        ended."""
        times = times if command == "learn" else 1  # learned maps change the next run
        key = (command, has_runs, times)
        if key not in self._known:
            folder = self.fresh("known", has_runs=has_runs)
            for _ in range(times):
                ended = self._whole(command, folder)
            self._known[key] = (found(folder), ended)
        return self._known[key]

    def fresh(self, name: str, *, has_runs: bool, under: Path | None = None) -> Path:
        """A folder with a store of earlier runs, or with none."""
        folder = (under or self._ground) / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.with_runs if has_runs else self.without, folder)
        return folder

    def check(self, command: str, folder: Path, *, has_runs: bool, times: int = 0) -> int:
        """Check that nothing is lost, partial or wrong; return how often the command has completed
        (`times` before)."""
        before = found(self.with_runs if has_runs else self.without)
        if before and not (folder / "moe.duckdb").exists():
            raise Lost(f"{command}: the store is gone")
        now = found(folder)
        wanted = {
            n: self.known(command, has_runs=has_runs, times=n)[0] if n else before
            for n in (times, times + 1)
        }
        may = [n for n, whole in wanted.items() if before <= now <= whole | before]
        if not may:
            raise Lost(
                f"{command}: runs are {_told(now)}, not {_told(before)} and some of "
                f"{_told(wanted[times + 1])}"
            )
        return may[0]

    def finish(
        self, command: str, folder: Path, *, has_runs: bool, times: int
    ) -> tuple[StoreFinding, ...]:
        """Run the command again, which must give the undisturbed result; return the files left
        beside the store. It had completed `times` before."""
        if not (times and command in NEW_FOLDER):
            self._whole(command, folder)
        now = found(folder)
        wanted = self.known(command, has_runs=has_runs, times=times + 1)[0]
        if now != wanted:
            raise Lost(f"{command} again: runs are {_told(now)}, not {_told(wanted)}")
        return findings(folder)

    def _whole(self, command: str, folder: Path) -> Ended:
        ended = self.start(command, folder).end()
        if ended.code:
            raise Lost(f"{command} undisturbed: exit {ended.code}: {ended.said[-600:]}")
        return ended

    def _make(self) -> None:
        rng = random.Random(0)
        lines = (f'{{"text": "{" ".join(rng.choices(_WORDS, k=30))}"}}\n' for _ in range(20))
        (self._ground / "text.jsonl").write_text("".join(lines))
        options = {"layers": 3, "experts": 6, "top-k": 2, "hidden": 64, "intermediate": 32}
        arguments = ["make_checkpoint", str(self._ground / "model"), "--family", "olmoe"]
        arguments += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        process = self._context.Process(target=_made, args=(arguments,))
        process.start()
        process.join(SLOWEST_S)
        if process.exitcode:
            raise Lost(f"no model could be made: {process.exitcode}")


class Child:
    """A running command."""

    def __init__(self, context: multiprocessing.context.BaseContext, task: tuple) -> None:
        self._pipe, theirs = context.Pipe(duplex=False)
        self._ground = task[1]
        self._death = task[3]
        self._process = context.Process(target=_run, args=(theirs, *task))
        self._began = time.monotonic()
        self._process.start()
        theirs.close()

    def end(self) -> Ended:
        """Wait for its end or its death. Raises Lost if it hangs."""
        if self._death and self._death.event is None:
            self._process.join(self._death.after_s)
            self._process.kill()
        self._process.join(SLOWEST_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise Lost(f"no end after {SLOWEST_S:.0f} s")
        seconds = time.monotonic() - self._began
        try:
            events = self._pipe.recv() if self._pipe.poll() else 0
        except EOFError:  # it was killed
            events = 0
        said = (self._ground / "said").read_text(errors="replace")
        return Ended(self._process.exitcode, said, events, seconds)


def found(folder: Path) -> Runs:
    """The contents of the store in a folder, after reading every row and every replica file, and
    the outputs."""
    path = folder / "moe.duckdb"
    if not path.exists():
        return outputs(folder)
    try:
        if wrong := [finding for finding in findings(folder) if finding.is_loss]:
            raise Lost(f"{len(wrong)} findings, first {wrong[0]}")
        with Store.open(path, read_only=True) as store:
            return frozenset(
                (run.info.command, _content(store, run)) for run in store.runs()
            ) | outputs(folder)
    except Problem as problem:
        raise Lost(f"the store does not open: {problem}") from problem


def _content(store: Store, run: StoredRun) -> str:
    return "whole" if run.info.command in TIMED else content_hash(store, run.run_id)


def findings(folder: Path) -> tuple[StoreFinding, ...]:
    """Return the findings of a check of the store; none where there is no store."""
    if not (folder / "moe.duckdb").exists():
        return ()
    with Store.open(folder / "moe.duckdb", read_only=True) as store:
        return check_store(store).findings


def _told(runs: Runs) -> str:
    return ", ".join(f"{command} {content[:6]}" for command, content in sorted(runs)) or "none"


def _modules() -> list[str]:
    """The modules that commands import, also those that their functions import."""
    commands = [each for each in modules("moectl") if each[0].startswith("moectl.commands.")]
    imported = {one.target.rpartition(".")[0] for each in commands for one in imports(*each)}
    return [
        "torch",
        "transformers.models.olmoe.modeling_olmoe",
        "tools.make.checkpoint",
        "moectl.cli",
        *sorted(imported),
    ]


def _made(arguments: list[str]) -> None:
    from tools.make import checkpoint as make_checkpoint

    sys.argv = arguments
    make_checkpoint.main()


def _run(
    pipe: Connection,
    arguments: tuple[str, ...],
    ground: Path,
    folder: Path,
    death: Death | None,
    longest_file: int | None,
) -> None:
    """Run the command in the child process."""
    from moectl.cli import main

    said = os.open(ground / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(ground)
    if longest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, resource.RLIM_INFINITY))
    counter = _Counter(death)
    sys.setprofile(counter)
    code = main([part.format(folder=folder) for part in arguments])
    sys.setprofile(None)
    if longest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    pipe.send(counter.events)
    sys.stdout.flush()
    os._exit(code)


class _Counter:
    """Counts calls into C and kills the process at a given count."""

    def __init__(self, death: Death | None) -> None:
        self.events = 0
        self._death = death

    def __call__(self, frame: object, event: str, called: object) -> None:
        if event != "c_call" or called.__name__ not in _EVENTS:
            return
        self.events += 1
        if self._death and self.events == self._death.event:
            _kill_after(self._death.after_s)


def _kill_after(seconds: float) -> None:
    if not seconds:
        os.kill(os.getpid(), signal.SIGKILL)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
