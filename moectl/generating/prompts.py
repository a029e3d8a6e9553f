"""The prompts of a file, a row each: plain text, JSON, jsonl or parquet. A row that cannot be used
says why, in its place."""

import hashlib
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO

from artifacts.common.untrusted import existing, parse_json
from artifacts.errors import BadInput, first_line
from moectl.shared.terminal.messages import Turn, turn_of
from profilers.text.files import (
    LONGEST,
    check_utf8,
    json_array,
    kind,
    opened,
    plain_errors,
    unpacked,
)

_LINES = (".jsonl", ".ndjson")
_JSON = ".json"
_PARQUET = ".parquet"
Id = str | int | float


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row: its number from 1 on, its `id` if it has one, and its prompt, a text or the messages
    of a chat. A row that cannot be used has a `problem` instead, by a code and in words."""

    number: int
    id: Id | None = None
    prompt: str | list[Turn] | None = None
    problem: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts as it was at first sight: the sha256 of its bytes, and a digest of 8 bytes
    for each row."""

    path: Path
    digest: str
    row_digests: array

    @classmethod
    def look(cls, name: str) -> "PromptFile":
        """Read the file for its digests. Raises BadInput for a name that is no file, a file that
        cannot be read, and a file without rows."""
        path = existing(name)
        if path is not None and not path.is_file() and not path.is_dir():
            raise BadInput(
                f"{name} is a pipe, which cannot be read again to go on: write its prompts to a "
                "file"
            )
        if path is None or not path.is_file():
            raise BadInput(
                f"no file of prompts at {name!r}: give a text, json, jsonl or parquet file"
            )
        digest = hashlib.sha256()
        with plain_errors(path), path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        row_digests = array("Q", (_digest(given) for given in _given(path)))
        if not row_digests:
            raise BadInput(f"{path} has no row: write a prompt a line")
        return cls(path, digest.hexdigest(), row_digests)

    @property
    def num_rows(self) -> int:
        return len(self.row_digests)

    def rows(self) -> Iterator[PromptRow]:
        """Yield every row in order. Raises BadInput where the file as a whole cannot be read, and
        at the first row that is another than at first sight."""
        seen: dict[Id, int] = {}
        number = 0
        for number, given in enumerate(_given(self.path), start=1):
            if number > self.num_rows or _digest(given) != self.row_digests[number - 1]:
                raise self._changed(number)
            row = _row(number, given)
            first = number if row.id is None else seen.setdefault(row.id, number)
            if first != number and row.problem is None:
                row = _bad(
                    number, "duplicate_id", f"row {first} has the same id {row.id!r}", of=row.id
                )
            yield row
        if number < self.num_rows:
            raise self._changed(number + 1)

    def _changed(self, number: int) -> BadInput:
        return BadInput(
            f"{self.path} was changed while it was answered: row {number:,} is not what it was; "
            "the answers so far are kept: put the former file back to go on, or name another "
            "--out for the new one"
        )


def _digest(given: object) -> int:
    """Return 64 bits that stand for a row as the file has it."""
    told = given if isinstance(given, bytes) else repr(given).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest())


def _given(path: Path) -> Iterator[object]:
    """Yield each row as the file has it: a line of text or JSON, bytes where it is neither, or
    fields."""
    with plain_errors(path), opened(path) as file:
        if kind(path) == _PARQUET:
            yield from _parquet_rows(path, file)
            return
        check_utf8(path, file)
        if kind(path) == _JSON and (rows := json_array(path, file)) is not None:
            yield from rows
            return
        is_json = kind(path) in (*_LINES, _JSON)
        for line in _lines(file):
            yield _JsonLine(line) if is_json else line


class _JsonLine(bytes):
    """A line that is to be JSON."""


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends; a line that is too long is cut to its beginning."""
    begins = True
    for line in iter(lambda: file.readline(LONGEST + 1), b""):
        if begins:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
        begins = line.endswith(b"\n")


def _parquet_rows(path: Path, file: IO[bytes]) -> Iterator[object]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = unpacked(path, file) if path.suffix.lower() == ".gz" else file
        table = pyarrow.parquet.ParquetFile(source)
        names = [name for name in ("id", "prompt", "messages") if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=256, columns=names):
            yield from batch.to_pylist() or [{}] * batch.num_rows
    except (pyarrow.ArrowException, OverflowError) as error:
        raise BadInput(
            f"{path} is not a whole parquet file ({first_line(error)}): fetch or write it again"
        ) from error


def _row(number: int, given: object) -> PromptRow:
    if isinstance(given, bytes):
        if len(given) > LONGEST:
            return _bad(number, "too_long", f"the row has more than {LONGEST:,} bytes")
        try:
            text = given.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            return _bad(number, "broken_row", "the row is not text in UTF-8")
        if not text.strip():
            return _bad(number, "empty_row", "the row is empty")
        if not isinstance(given, _JsonLine):
            return PromptRow(number, prompt=text)
        try:
            given = parse_json(text)
        except ValueError as error:
            return _bad(number, "broken_row", f"the row is not JSON: {first_line(error)}")
    return _of_fields(number, given)


def _of_fields(number: int, given: object) -> PromptRow:
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, Mapping):
        return _bad(
            number,
            "broken_row",
            f"the row is neither an object nor a text but {type(given).__name__}",
        )
    given = {name: value for name, value in given.items() if value is not None}
    name = given.get("id")
    if isinstance(name, Decimal):  # as Parquet has it
        name = int(name) if name == name.to_integral_value() else float(name)
    if not _is_id(name):
        return _bad(number, "broken_row", "the id is neither a text nor a number")
    if ("prompt" in given) == ("messages" in given):
        return _bad(
            number, "broken_row", "the row needs a field 'prompt' or a field 'messages'", of=name
        )
    if given.get("prompt") == "":
        return _bad(number, "empty_row", "the prompt is empty", of=name)
    prompt = given["prompt"] if "prompt" in given else _turns(given["messages"])
    if prompt is None or "prompt" in given and not isinstance(prompt, str):
        return _bad(
            number, "broken_row", "the prompt is no text, or the messages no turns of text", of=name
        )
    return PromptRow(number, name, prompt)


def _is_id(name: object) -> bool:
    if isinstance(name, float):
        return math.isfinite(name)
    return name is None or isinstance(name, str | int) and not isinstance(name, bool)


def _turns(messages: object) -> list[Turn] | None:
    """Return the turns of a chat, None where they are not a list of roles and texts."""
    if not isinstance(messages, list) or not messages:
        return None
    turns = [turn_of(message) for message in messages]
    return None if None in turns else turns


def _bad(number: int, code: str, message: str, *, of: Id | None = None) -> PromptRow:
    return PromptRow(number, of, problem=(code, message))
