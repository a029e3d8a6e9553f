"""Files that are not there, or cannot be read: by root, who may read all, with an open that is
refused."""

import errno
import os
import re
from pathlib import Path

import pytest

from artifacts.common.untrusted import existing, read_json, readable
from artifacts.errors import BadInput

DENIED = "cannot be read, permission denied: give this user the right to read it"


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be looked into, and whose files may not be opened."""
    folder = Path("/denied")
    stat = Path.stat

    def refuse(path: Path, **options: object) -> os.stat_result:
        if folder in (path, *path.parents) and path != folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    return folder


def test_what_may_not_be_looked_at_is_said(denied: Path) -> None:
    path = denied / "config.json"
    for ask in (readable, read_json, lambda path: existing(str(path))):
        with pytest.raises(BadInput, match=re.escape(f"{path} {DENIED}")):
            ask(path)


def test_a_file_that_may_not_be_opened_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert readable(path) and read_json(path) == {}
    for number, line in ((errno.EACCES, DENIED), (errno.EIO, "cannot be read: Input/output error")):
        error = OSError(number, os.strerror(number), str(path))

        def fail(*_: object, error: OSError = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(Path, "open", fail)
        with pytest.raises(BadInput, match=re.escape(f"{path} {line}")):
            readable(path)


def test_what_is_no_file_is_told_from_what_is_not_there(tmp_path: Path) -> None:
    assert not readable(tmp_path / "none") and existing(str(tmp_path / "none")) is None
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    link = tmp_path / "link"
    pipe = tmp_path / "pipe"
    link.symlink_to("gone")
    os.mkfifo(pipe)
    for path, line in (
        (tmp_path, "is a folder, and a file is needed there"),
        (pipe, "is no plain file, and a file is needed there"),
        (link, "is a link to gone, where there is nothing"),
    ):
        with pytest.raises(BadInput, match=f"{path.name} {line}"):
            readable(path)
    with pytest.raises(BadInput, match="is a link to gone"):
        existing(str(link))
