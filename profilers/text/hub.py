"""Streams documents from the Hugging Face hub: `hf:name[:config[:split]]`."""

from collections.abc import Iterable, Iterator

from artifacts.errors import BadInput, first_line
from profilers.text.files import Document, row_text

REMEDY = "check the name, the configuration, the split and the network, or give a local file"


def read(spec: str) -> Iterator[Document]:
    """Yield the rows in the data set's order. Without a name the split is `train`, the
    configuration the default."""
    name, config, split = parsed(spec)
    for number, row in enumerate(rows(spec, name, config=config, split=split), start=1):
        where = f"{spec}:{number}"
        yield Document(where, row_text(row, where))


def parsed(spec: str) -> tuple[str, str | None, str]:
    name, config, split, *more = [*spec.removeprefix("hf:").split(":"), "", ""]
    if not name or any(more):
        raise BadInput(f"{spec!r} names no data set: write hf:name[:config[:split]]")
    return name, config or None, split or "train"


def rows(spec: str, name: str, *, config: str | None, split: str) -> Iterator[object]:
    import datasets
    from datasets.exceptions import DatasetsError

    # datasets raises StopIteration for data without files, and does not wrap network errors.
    errors = (OSError, ValueError, RuntimeError, StopIteration, DatasetsError)
    try:
        stream: Iterable = datasets.load_dataset(name, config, split=split, streaming=True)
    except errors as error:
        raise BadInput(f"{spec} cannot be loaded ({first_line(error)}): {REMEDY}") from error
    yield from guarded(spec, stream, errors)


def guarded(
    spec: str, stream: Iterable, errors: tuple[type[BaseException], ...]
) -> Iterator[object]:
    iterator = iter(stream)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except errors as error:
            raise BadInput(f"{spec} broke off ({first_line(error)}): {REMEDY}") from error
        yield row
