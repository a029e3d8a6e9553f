"""Files of text in every supported format, and the line that refuses an invalid one."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from artifacts.errors import BadInput
from profilers.text.corpus import documents


def texts(spec: object) -> list[str]:
    return [document.text for document in documents(str(spec))]


def write(path: Path, content: str | bytes | list[dict]) -> Path:
    """Write rows as jsonl or parquet by the suffix; .gz is compressed."""
    if isinstance(content, list) and ".parquet" in path.suffixes:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), sink)
        content = sink.getvalue().to_pybytes()
    elif isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


def refusal(spec: object) -> str:
    """The line of the error that a user reads."""
    with pytest.raises(BadInput) as caught:
        texts(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)
