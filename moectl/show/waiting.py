"""Messages of a command on stderr while its user waits for a model. Nothing here imports torch."""

from pathlib import Path

from artifacts.common.untrusted import readable
from moectl.bundled import demo_model
from moectl.shared.terminal.obtaining import obtain
from moectl.shared.terminal.waiting import Waiting
from moectl.show.render import human_bytes
from runtime.model.files.locate import weight_files


def loading(name: str | None, *, preset: str, budget: str, is_quiet: bool = False) -> Waiting:
    """Begin to wait for a model, None for the bundled one, after a look at its files; of a model of
    the hub they are downloaded now.

    Raises what `obtain` raises.
    """
    nbytes = _nbytes(obtain(name or str(demo_model())))
    what = f"Loading {name or 'the bundled model'}: {human_bytes(nbytes)}"
    return Waiting(f"{what}, preset {preset}, budget {budget}", nbytes=nbytes, is_quiet=is_quiet)


def reading(name: str) -> Waiting:
    """Begin to wait for a model of which the user has been told: without a terminal nothing is
    said."""
    return Waiting(f"Reading {name}", nbytes=_nbytes(obtain(name)), is_quiet=True)


def _nbytes(found: Path) -> int:
    """Return the bytes of a model's weights."""
    return sum(path.stat().st_size for path in weight_files(found) if readable(path))
