"""What comes from anywhere: paths that may be none, JSON that may be too deep, rows that may be of nothing."""

import json
from pathlib import Path, PurePosixPath

from artifacts.errors import BadInput


def existing(text: str) -> Path | None:
    """The path that was typed, if something is there; a text that cannot be a path is none."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # longer than a name can be; the home of nobody; a NUL in it
        return None


def parse_json(text: str | bytes) -> object:
    """What JSON says. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> object:
    """What a JSON file says. Raises ValueError, and OSError where it cannot be read."""
    return parse_json(path.read_bytes())


def inside(folder: Path, name: str) -> Path:
    """The file that a manifest calls `name`, in its folder. Raises BadInput for one that leads out of it."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise BadInput(f"{name!r} is no file in {folder}: such a manifest is not followed, make it again")
    return folder / name
