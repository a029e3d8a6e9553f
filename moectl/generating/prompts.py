"""The prompts of a file, a row each: plain text, jsonl or parquet. A row that cannot be used says why, in its place."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from artifacts.common.untrusted import existing, parse_json
from artifacts.errors import BadInput, first_line
from profilers.text.files import LONGEST, kind, opened, plain_errors, unpacked

Turn = Mapping[str, str]
_JSON, _PARQUET = (".jsonl", ".ndjson"), ".parquet"
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}  # as templates know them


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row: its number from 1 on, its `id` if it has one, and its prompt, a text or the messages of a chat; or
    the `problem` that it has, by a code and in words."""

    number: int
    id: str | int | None = None
    prompt: str | list[Turn] | None = None
    problem: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts as it was at first sight: the number of its rows, and the sha256 of its bytes."""

    path: Path
    num_rows: int
    digest: str

    @classmethod
    def look(cls, name: str) -> "PromptFile":
        """Raises BadInput for what is no file, cannot be read, or has no row."""
        path = existing(name)
        if path is None or not path.is_file():
            raise BadInput(f"no file of prompts at {name!r}: give a text, jsonl or parquet file")
        digest = hashlib.sha256()
        with plain_errors(path), path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        num_rows = sum(1 for _ in _given(path))
        if not num_rows:
            raise BadInput(f"{path} has no row: write a prompt a line")
        return cls(path, num_rows, digest.hexdigest())

    def rows(self) -> Iterator[PromptRow]:
        """Yield every row in order. Raises BadInput where the file as a whole cannot be read."""
        seen: dict[str | int, int] = {}
        for number, given in enumerate(_given(self.path), start=1):
            row = _row(number, given)
            first = number if row.id is None else seen.setdefault(row.id, number)
            if first != number and row.problem is None:
                row = _bad(number, "duplicate_id", f"row {first} has the same id {row.id!r}", of=row.id)
            yield row


def _given(path: Path) -> Iterator[object]:
    """Yield each row as the file has it: a line of text or JSON, bytes where it is neither, or fields."""
    with plain_errors(path), opened(path) as file:
        if kind(path) == _PARQUET:
            yield from _parquet_rows(path, file)
            return
        is_json = kind(path) in _JSON
        for line in _lines(file):
            yield _JsonLine(line) if is_json else line


class _JsonLine(bytes):
    """A line that is to be JSON."""


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines without their ends; of one that is too long, its beginning, and no more of it."""
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
        raise BadInput(f"{path} is not a whole parquet file ({first_line(error)}): fetch or write it again") from error


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
    if not isinstance(given, Mapping):
        return _bad(number, "broken_row", f"the row is no object but {type(given).__name__}")
    given = {name: value for name, value in given.items() if value is not None}
    name = given.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        return _bad(number, "broken_row", "the id is neither a text nor a whole number")
    if ("prompt" in given) == ("messages" in given):
        return _bad(number, "broken_row", "the row needs a field 'prompt' or a field 'messages'", of=name)
    if given.get("prompt") == "":
        return _bad(number, "empty_row", "the prompt is empty", of=name)
    prompt = given["prompt"] if "prompt" in given else _turns(given["messages"])
    if prompt is None or "prompt" in given and not isinstance(prompt, str):
        return _bad(number, "broken_row", "the prompt is no text, or the messages no turns of text", of=name)
    return PromptRow(number, name, prompt)


def _turns(messages: object) -> list[Turn] | None:
    """The messages of a chat, None where they are not a list of roles and texts."""
    if not isinstance(messages, list) or not messages:
        return None
    turns = [_turn(message) for message in messages]
    return None if None in turns else turns


def _turn(message: object) -> Turn | None:
    if not isinstance(message, Mapping):
        return None
    role, content = message.get("role"), message.get("content")
    is_sound = isinstance(role, str) and role in _ROLES and isinstance(content, str)
    return {"role": _ROLES[role], "content": content} if is_sound else None


def _bad(number: int, code: str, message: str, *, of: str | int | None = None) -> PromptRow:
    return PromptRow(number, of, problem=(code, message))
