"""The file of answers: a JSON line each, in the order of the prompts, whole whatever ends the
command."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from artifacts.common.files import as_problem, check_writable
from artifacts.common.locks import locked
from artifacts.common.untrusted import parse_json
from artifacts.errors import BadInput, Incompatible

_BEGINNING = b'{"row": 1, '


class AnswerFile:
    """File that takes answers in any order and appends each once all before it are there.
    `num_written` counts all lines, also of earlier commands; `num_bad` counts those with an
    error."""

    def __init__(
        self, file: IO[bytes], path: Path, run: str, *, num_written: int, num_bad: int
    ) -> None:
        self.num_written = num_written
        self.num_bad = num_bad
        self._file = file
        self._path = path
        self._run = run
        self._early: dict[int, bytes] = {}  # by the number of the row

    def put(self, number: int, answer: Mapping[str, object]) -> None:
        """Take the answer to row `number`, from 1 on. Raises OutOfResources where the disk is full:
        every line that is there is whole."""
        line = {"row": number, **answer, "run": self._run}
        self._early[number] = (
            json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        )
        self.num_bad += "error" in answer
        lines = []
        while (following := self.num_written + len(lines) + 1) in self._early:
            lines.append(self._early.pop(following))
        if lines:
            self._append(lines)

    def _append(self, lines: list[bytes]) -> None:
        end = self._file.tell()
        try:
            for line in lines:
                _write_all(self._file, line)
                end += len(line)
                self.num_written += 1
        except OSError as error:
            self._file.truncate(end)
            raise as_problem(error, self._path) from error


def _write_all(file: IO[bytes], line: bytes) -> None:
    """Write the whole line: a disk that becomes full takes a part of a write without an error."""
    while line:
        line = line[file.write(line) :]


@contextmanager
def appended(path: Path, run: str) -> Iterator[AnswerFile]:
    """Open a new file of answers, or one that a command with the same `run` has begun, without a
    line that was not written to its end.

    Raises BadInput where it cannot be written, Incompatible where another command has begun it,
    OutOfResources where another process writes it.
    """
    check_writable(path)
    if path.exists():
        _whole_lines(path, run)  # before anything is opened for writing
    with (
        locked(
            path,
            busy=f"another command writes {path}: wait for it, or name another file with --out",
        ),
        _unbuffered(path) as file,
    ):
        num_written, num_bad, end = _whole_lines(path, run)
        file.truncate(end)
        file.seek(end)
        yield AnswerFile(file, path, run, num_written=num_written, num_bad=num_bad)
        os.fsync(file.fileno())


@contextmanager
def _unbuffered(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from error
    with file:
        yield file


def _whole_lines(path: Path, run: str) -> tuple[int, int, int]:
    """Return the number of whole lines, the number of errors among them, and the offset of their
    end in bytes. Raises Incompatible."""
    num_lines = 0
    num_bad = 0
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            answer = _parsed(line)
            if answer.get("run") != run or answer.get("row") != num_lines + 1:
                raise Incompatible(
                    f"{path} was not begun by this command: prompts, model or settings differ; "
                    "name another with --out"
                )
            num_lines += 1
            num_bad += "error" in answer
            end += len(line)
    if num_lines == 0 and end < path.stat().st_size and not _may_be_begun(path):
        raise Incompatible(f"{path} is no file of answers: name another with --out")
    return num_lines, num_bad, end


def _may_be_begun(path: Path) -> bool:
    """Return whether a file without a whole line may hold the beginning of an answer."""
    with path.open("rb") as file:
        return _BEGINNING.startswith(file.read(len(_BEGINNING)))


def _parsed(line: bytes) -> Mapping[str, object]:
    try:
        answer = parse_json(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, Mapping) else {}
