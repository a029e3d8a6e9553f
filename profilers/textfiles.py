"""Documents from files on disk: text, jsonl, parquet, any of them gzipped, and folders of these.

They are read here and not through `datasets`, whose cache is keyed on path and time and can serve an edited file's old
rows.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from artifacts.errors import BadInput
from profilers.document import Document


def read(path: Path) -> Iterator[Document]:
    """The documents of a file, or of all files of a folder in sorted order, hidden ones left out."""
    for file in files(path):
        yield from read_file(file)


def files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not is_hidden(file.relative_to(path)))


def is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def read_file(path: Path) -> Iterator[Document]:
    """A text file is one document; a row of jsonl or parquet is one."""
    reader = READERS.get(kind(path), text_document)
    with plain_errors(path), opened(path) as file:
        yield from reader(path, file)


def kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


@contextlib.contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """What a damaged or foreign file raises, as one line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or give a text, jsonl or parquet file"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path} is not a whole gzip file ({error}): fetch or compress it again") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error


def text_document(path: Path, file: IO[bytes]) -> Iterator[Document]:
    yield Document(str(path), io.TextIOWrapper(file, encoding="utf-8-sig").read())


def jsonl_documents(path: Path, file: IO[bytes]) -> Iterator[Document]:
    for number, line in enumerate(io.TextIOWrapper(file, encoding="utf-8-sig"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield Document(where, row_text(json_row(line, where), where))


def json_row(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON ({error}): give one JSON object a line") from error


def parquet_documents(path: Path, file: IO[bytes]) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = io.BytesIO(file.read()) if path.suffix.lower() == ".gz" else file
        batches = pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            where = f"{path}:{number}"
            yield Document(where, row_text(row, where))
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path} is not a whole parquet file ({first_line(error)}): fetch or write it again") from error


def row_text(row: object, where: str) -> str:
    """The field `text`, or else all string fields, one a line (a question and its answer, say)."""
    if not isinstance(row, Mapping):
        raise BadInput(f"{where}: a row must be an object with a field 'text', not {type(row).__name__}")
    if isinstance(row.get("text"), str):
        return row["text"]
    strings = [value for value in row.values() if isinstance(value, str)]
    if "text" in row or not strings:
        raise BadInput(
            f"{where}: no text in the fields {', '.join(map(repr, row)) or '(none)'}: name a field of strings 'text'"
        )
    return "\n".join(strings)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


READERS = {".jsonl": jsonl_documents, ".ndjson": jsonl_documents, ".parquet": parquet_documents}
