"""Input that may be malformed: paths that do not exist, JSON that is nested too deeply, manifests that point
outside."""

import json
from pathlib import Path, PurePosixPath

from artifacts.errors import BadInput


def existing(text: str) -> Path | None:
    """Return the path that was typed if it exists; None for a text that cannot be a path."""
    try:
        path = Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # name too long; unknown home directory; NUL in the text
        return None


def parse_json(text: str | bytes) -> object:
    """Return the parsed value. Raises ValueError, also where the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> object:
    """Return the value in a JSON file. Raises ValueError, and OSError where the file cannot be read."""
    return parse_json(path.read_bytes())


def inside(folder: Path, name: str) -> Path:
    """Return the file in `folder` that a manifest calls `name`. Raises BadInput for a name that leads out of the
    folder."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise BadInput(f"{name!r} is no file in {folder}: such a manifest is not followed, make it again")
    return folder / name
