"""Changes the weights of a checkpoint in place: header, sizes and names stay."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.model.files.checkpoint import open_checkpoint


@contextmanager
def rewritten(folder: Path, name: str, *, part: tuple[int, int] = (0, 1)) -> Iterator[None]:
    """Invert the lowest bit of every number of a tensor, or of the i-th of n equal parts of it;
    restore it at the end."""
    invert(folder, name, part=part)
    try:
        yield
    finally:
        invert(folder, name, part=part)


def invert(folder: Path, name: str, *, part: tuple[int, int] = (0, 1)) -> None:
    """As `rewritten`, for good."""
    checkpoint = open_checkpoint(folder)
    tensor = checkpoint.tensors[name]
    nbytes = tensor.nbytes // part[1]
    start = tensor.offset + part[0] * nbytes
    with tensor.shard.path.open("r+b") as file:
        file.seek(start)
        content = bytearray(file.read(nbytes))
        content[:: tensor.dtype.itemsize] = bytes(
            byte ^ 1 for byte in content[:: tensor.dtype.itemsize]
        )
        file.seek(start)
        file.write(content)
    checkpoint.close()
