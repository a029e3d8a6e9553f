"""Input that may be malformed: paths that do not exist or cannot be read, JSON that is nested too
deeply, manifests that point outside."""

import codecs
import errno
import json
import os
import stat
from pathlib import Path, PurePosixPath

from artifacts.errors import BadInput


def existing(text: str) -> Path | None:
    """Return the path that was typed if it exists; None for a text that cannot be a path. Raises
    BadInput where the path may not be looked at, and for a link that leads nowhere."""
    try:
        path = Path(text).expanduser()
        return path if text and _status(path) else None
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # name too long; unknown home directory; NUL in the text
        return None


def readable(path: Path) -> bool:
    """Return whether there is a file at a path. Raises BadInput for one that cannot be read:
    without permission, a folder or a device in its place, a link that leads nowhere."""
    try:
        status = _status(path)
        if status is None:
            return False
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(
                f"{path} is {_kind(status)}, and a file is needed there: download the model again"
            )
        with path.open("rb"):
            return True
    except OSError as error:
        raise unreadable(path, error) from error


def has_json(path: Path) -> bool:
    """Return whether there is a file at a path. Raises BadInput as `readable`, and for a text that
    other programs do not take for JSON."""
    if not readable(path):
        return False
    with path.open("rb") as file:
        first = file.read(4)
    if (
        first.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        or b"\0" in first[:2]
    ):
        raise BadInput(
            f"{path} is in another encoding than UTF-8, or begins with a mark of one: save it as "
            "UTF-8"
        )
    return True


def unreadable(path: Path, error: OSError) -> BadInput:
    """The error that a user sees for the system's, of a file that is there and cannot be read."""
    if isinstance(error, PermissionError):
        return BadInput(
            f"{path} cannot be read, permission denied: give this user the right to read it"
        )
    return BadInput(f"{path} cannot be read: {error.strerror or error}")


def _status(path: Path) -> os.stat_result | None:
    """None where there is nothing. Raises BadInput, as `readable`, and OSError."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise BadInput(
                f"{path} is a link to {path.readlink()}, where there is nothing: download it again"
            ) from None
        return None
    except PermissionError as error:
        raise unreadable(path, error) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # nothing can have such a name
            return None
        raise


def _kind(status: os.stat_result) -> str:
    return "a folder" if stat.S_ISDIR(status.st_mode) else "no plain file"


def parse_json(text: str | bytes) -> object:
    """Return the parsed value. Raises ValueError, also where the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> object:
    """Return the value in a JSON file. Raises ValueError, FileNotFoundError, and BadInput where the
    file cannot be read."""
    if not readable(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return parse_json(path.read_bytes())


def inside(folder: Path, name: str) -> Path:
    """Return the file in `folder` that a manifest calls `name`. Raises BadInput for a name that
    leads out of the folder."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise BadInput(
            f"{name!r} is no file in {folder}: such a manifest is not followed, make it again"
        )
    return folder / name
