"""Documents, and how they are read from files: text, jsonl, parquet, any of them gzipped, and
folders of these.

Files are not read through `datasets`: its cache is keyed on path and time and can return the old
rows of an edited file.
"""

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from artifacts.common.untrusted import parse_json
from artifacts.errors import BadInput, first_line, shortage

if TYPE_CHECKING:
    import pyarrow

LONGEST = 1 << 26  # characters of a line, or of one part of a plain text
MOST_UNPACKED = 1 << 30  # bytes
_PEEKED = 1 << 12


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` says where it is from and is the same in every run."""

    name: str
    text: str


def read(path: Path) -> Iterator[Document]:
    """Yield the documents of a file, or of all files of a folder in sorted order, hidden files
    excluded."""
    for file in files(path):
        yield from read_file(file)


def files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path} is neither a file nor a folder: write its text to a file first")
    return sorted(
        file for file in path.rglob("*") if file.is_file() and not is_hidden(file.relative_to(path))
    )


def is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def read_file(path: Path) -> Iterator[Document]:
    """Yield a text file as one document, and each row of jsonl or parquet as one."""
    reader = READERS.get(kind(path), text_document)
    with plain_errors(path), opened(path) as file:
        if reader is not parquet_documents:
            check_utf8(path, file)
        yield from reader(path, file)


def kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


@contextlib.contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a file that is damaged or of another format into a BadInput of one
    line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, or give a text, jsonl or "
            "parquet file"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(
            f"{path} is not a whole gzip file ({error}): fetch or compress it again"
        ) from error
    except OSError as error:
        raise shortage(error) or BadInput(
            f"{path} cannot be read: {error.strerror or error}"
        ) from error


def check_utf8(path: Path, file: IO[bytes]) -> None:
    """Raise BadInput for a file that begins as UTF-16 or UTF-32 does, with a mark or with zeros;
    read nothing of it."""
    begins = file.peek(_PEEKED)[:_PEEKED]
    if b"\0" in begins or begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadInput(
            f"{path} is not UTF-8 text but UTF-16 or binary: save it as UTF-8 (as `iconv -t "
            "UTF-8` does)"
        )


def json_array(path: Path, file: IO[bytes]) -> list[object] | None:
    """Return the rows of a JSON file that is one array; None, and the file at its beginning, for
    any other."""
    whole = file.read(MOST_UNPACKED + 1)
    if len(whole) > MOST_UNPACKED:
        raise BadInput(
            f"{path} holds more than {MOST_UNPACKED / 2**30:.0f} GiB: give one JSON object a line "
            "(.jsonl)"
        )
    try:
        rows = parse_json(whole)
    except ValueError:
        rows = None
    file.seek(0)
    return rows if isinstance(rows, list) else None


def json_documents(path: Path, file: IO[bytes]) -> Iterator[Document]:
    """Yield each row of an array as one document, and any other JSON as text."""
    rows = json_array(path, file)
    if rows is None:
        yield from text_document(path, file)
        return
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{number}"
        yield Document(where, row if isinstance(row, str) else row_text(row, where))


def text_document(path: Path, file: IO[bytes]) -> Iterator[Document]:
    """Yield one document, or several in order for a very long file."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    while part := text.read(LONGEST):
        yield Document(str(path), part + text.readline(LONGEST))


def jsonl_documents(path: Path, file: IO[bytes]) -> Iterator[Document]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    for number, line in enumerate(iter(lambda: text.readline(LONGEST + 1), ""), start=1):
        where = f"{path}:{number}"
        if len(line) > LONGEST:
            raise BadInput(
                f"{where}: longer than {LONGEST:,} characters: give one JSON object a line"
            )
        if line.strip():
            yield Document(where, row_text(json_row(line, where), where))


def json_row(line: str, where: str) -> object:
    try:
        return parse_json(line)
    except ValueError as error:
        raise BadInput(f"{where}: not JSON ({error}): give one JSON object a line") from error


def parquet_documents(path: Path, file: IO[bytes]) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = unpacked(path, file) if path.suffix.lower() == ".gz" else file
        table = pyarrow.parquet.ParquetFile(source)
        empty_row = dict.fromkeys(table.schema_arrow.names)
        batches = table.iter_batches(batch_size=256, columns=text_columns(table.schema_arrow))
        rows = (row for batch in batches for row in batch.to_pylist() or [{}] * batch.num_rows)
        for number, row in enumerate(rows, start=1):
            where = f"{path}:{number}"
            yield Document(where, row_text(empty_row | row, where))
    except (pyarrow.ArrowException, OverflowError) as error:
        raise BadInput(
            f"{path} is not a whole parquet file ({first_line(error)}): fetch or write it again"
        ) from error


def unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    """Unpack a gzipped file into memory, because Parquet is read from its end."""
    whole = file.read(MOST_UNPACKED + 1)
    if len(whole) > MOST_UNPACKED:
        raise BadInput(
            f"{path} unpacks to more than {MOST_UNPACKED / 2**30:.0f} GiB: give it unpacked"
        )
    return io.BytesIO(whole)


def text_columns(schema: "pyarrow.Schema") -> list[str]:
    """Return the columns to read: `text`, else every column of strings. Other types may have no
    value in Python."""
    import pyarrow.types as kinds

    def is_text(kind: "pyarrow.DataType") -> bool:
        kind = kind.value_type if kinds.is_dictionary(kind) else kind
        return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)

    strings = [field.name for field in schema if is_text(field.type)]
    return [name for name in strings if name == "text"] if "text" in schema.names else strings


def row_text(row: object, where: str) -> str:
    """Return the text of a row. Raises BadInput where a row has no text, or text that is not
    Unicode."""
    text = fields_text(row, where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{where}: half a character (a lone surrogate) in the text: write it anew as UTF-8"
        ) from error
    return text


def fields_text(row: object, where: str) -> str:
    """Return the field `text`, or else all string fields, one a line (for example a question and
    its answer)."""
    if not isinstance(row, Mapping):
        raise BadInput(
            f"{where}: a row must be an object with a field 'text', not {type(row).__name__}"
        )
    if isinstance(row.get("text"), str):
        return row["text"]
    strings = [value for value in row.values() if isinstance(value, str)]
    if "text" in row or not strings:
        raise BadInput(
            f"{where}: no text in the fields {', '.join(map(repr, row)) or '(none)'}: name a "
            "field of strings 'text'"
        )
    return "\n".join(strings)


READERS = {
    ".json": json_documents,
    ".jsonl": jsonl_documents,
    ".ndjson": jsonl_documents,
    ".parquet": parquet_documents,
}
