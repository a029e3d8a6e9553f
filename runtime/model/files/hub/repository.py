"""A model in a repository of the Hugging Face hub: its files, the download of those that this
machine lacks, and a look at its config or header alone.

huggingface_hub does the downloading, into its cache, and is imported when a hub is asked.
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import NamedTuple

from artifacts.common.files import replacing
from artifacts.errors import BadInput, OutOfResources, first_line
from artifacts.formats.gguf.gguf_header import has_header
from runtime.model.files.hub.names import HubName
from runtime.model.files.hub.quants import (
    PART,
    UNWANTED,
    WANTED,
    SeveralQuants,
    chosen,
    is_gguf_name,
    quants_of,
)

_ANSWER_S = 5.0  # how long the hub may take to answer
_FIRST_NBYTES = 1 << 20  # of a file that are read for its header; then twice as many
_CONFIGS = ("config.json", "hf_quant_config.json")


class HubFile(NamedTuple):
    """Bytes of a file, and the name that the cache has for its contents."""

    nbytes: int
    blob: str


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one model in a repository, as of one commit. `cache` is the repository's folder
    in the cache of this machine."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]
    cache: Path

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def missing_nbytes(self) -> int:
        """Bytes of the files that the cache lacks."""
        blobs = self.cache / "blobs"
        return sum(file.nbytes for file in self.files.values() if not (blobs / file.blob).exists())

    @property
    def kept_nbytes(self) -> int:
        """Bytes that the cache has of this repository, also of files that are not whole yet."""
        return sum(map(_size, self.cache.glob("blobs/*")))

    @property
    def free_nbytes(self) -> int:
        """Free bytes of the disk that has the cache."""
        folder = next(each for each in (self.cache, *self.cache.parents) if each.exists())
        return shutil.disk_usage(folder).free

    def fetch(self) -> Path:
        """Download what is missing, and return the folder of the model or its first GGUF file.

        Raises OutOfResources before anything is downloaded where the disk has too little room, and
        BadInput for a download that breaks off. Files that came whole are kept.
        """
        from httpx2 import HTTPError
        from huggingface_hub import snapshot_download

        missing = self.missing_nbytes
        if missing > self.free_nbytes:
            raise OutOfResources(
                f"{self.name} takes {missing / 2**30:.1f} GiB more, and {self.cache.parent} has "
                f"{self.free_nbytes / 2**30:.1f} GiB free: free some, or set HF_HOME to a folder "
                "on a larger disk"
            )
        try:
            folder = snapshot_download(
                self.name.repo, revision=self.commit, allow_patterns=[*map(escape, self.files)]
            )
        except (HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of this machine's disk
                raise
            raise BadInput(
                f"the download of {self.name} broke off ({_reason(error)}): run this again, whole "
                "files are kept"
            ) from error
        finally:
            self._note_revision()
        return entry(Path(folder), self.files)

    def _note_revision(self) -> None:
        """Note in the cache which commit the revision is, by which it is found offline: for a
        commit huggingface_hub notes nothing. A cache that others fill may be read-only."""
        revision = self.name.revision or "main"
        snapshot = self.cache / "snapshots" / self.commit
        if revision != self.commit and snapshot.is_dir() and os.access(self.cache, os.W_OK):
            note = self.cache / "refs" / revision
            note.parent.mkdir(parents=True, exist_ok=True)
            with replacing(note) as temporary:
                temporary.write_text(self.commit)

    def describe(self, folder: Path) -> Path:
        """Write what the model says of itself into `folder`, without its weights, and return its
        path: a folder with a config.json, or a GGUF file with its header and a hole for the rest.
        Raises BadInput where the hub breaks off."""
        first = next(iter(self.files))
        if not is_gguf_name(first):
            place = folder / self.name.repo.rpartition("/")[2]
            place.mkdir()
            for name in (name for name in _CONFIGS if name in self.files):
                (place / name).write_bytes(self._read(name, 0, self.files[name].nbytes))
            return place
        for name, file in self.files.items():
            path = folder / Path(name).name
            path.write_bytes(self._header(name, file.nbytes))
            with path.open("r+b") as hollow:
                hollow.truncate(file.nbytes)
        return folder / Path(first).name

    def _header(self, name: str, nbytes: int) -> bytes:
        """Return the beginning of a GGUF file, with all of its header."""
        head = self._read(name, 0, min(nbytes, _FIRST_NBYTES))
        while len(head) < nbytes and not has_header(head):
            head += self._read(name, len(head), min(nbytes, 2 * len(head)))
        return head

    def _read(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` up to `end`, and read no others."""
        from httpx2 import HTTPError
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        headers = build_hf_headers() | {
            "Range": f"bytes={start}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        url = hf_hub_url(self.name.repo, name, revision=self.commit)
        try:
            with http_stream_backoff("GET", url, headers=headers, timeout=_ANSWER_S) as response:
                hf_raise_for_status(response)
                if response.status_code == 200 and end < self.files[name].nbytes:
                    raise BadInput(f"the hub sends {name} of {self.name} whole: download it first")
                return response.read()
        except (HTTPError, OSError) as error:
            raise BadInput(
                f"{name} of {self.name} cannot be read ({_reason(error)}): try again"
            ) from error


def look_up(name: HubName) -> Download:
    """Ask the hub for the files of a model, which takes one request.

    Raises BadInput for a model that the repository does not have; with the reason in words,
    LookupError where the hub refuses, and ConnectionError where it is not reached.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi().model_info(
            name.repo, revision=name.revision or None, files_metadata=True, timeout=_ANSWER_S
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise LookupError(_reason(error)) from error
    except (OSError, HTTPError) as error:
        raise ConnectionError(_reason(error)) from error
    files = {
        each.rfilename: HubFile(each.size or 0, each.lfs.sha256 if each.lfs else each.blob_id or "")
        for each in info.siblings or ()
    }
    sizes = {file: each.nbytes for file, each in files.items()}
    wanted = chosen(name.repo, sizes, name.quant)
    return Download(name, info.sha, {file: files[file] for file in wanted}, _cache(name.repo))


def cached(name: HubName) -> Path:
    """Return the model as the cache of this machine has it.

    Raises FileNotFoundError where it has nothing of the model, BadInput where it has a part, and
    SeveralQuants.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError

    def snapshot(**patterns: object) -> Path:
        wanted = {"revision": name.revision or None, "local_files_only": True, **patterns}
        return Path(snapshot_download(name.repo, **wanted))

    try:
        folder = snapshot(allow_patterns=[])  # whatever it holds
        here = files_in(folder)
        if not quants_of(here):
            snapshot(allow_patterns=WANTED, ignore_patterns=UNWANTED)  # raises if it is not whole
        files = chosen(name.repo, here, name.quant)
    except IncompleteSnapshotError as error:
        raise BadInput(f"only a part of {name} was downloaded") from error
    except SeveralQuants:
        raise
    except (HFValidationError, BadInput) as error:
        raise FileNotFoundError(name.repo) from error
    _check_parts(name, files)
    return entry(folder, files)


def _check_parts(name: HubName, files: Sequence[str]) -> None:
    """Raise BadInput unless a model in several GGUF files has them all."""
    part = PART.fullmatch(files[0])
    if part and len(files) < int(part["count"]):
        raise BadInput(f"only {len(files)} of {int(part['count'])} files of {name} were downloaded")


def files_in(folder: Path) -> dict[str, int]:
    """Return the files in a folder and in its folders, by name, with their bytes."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def entry(folder: Path, files: Iterable[str]) -> Path:
    """Return the path that stands for a model: its first GGUF file, or its folder."""
    first = next(iter(files))
    return folder / first if is_gguf_name(first) else folder


def _cache(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it got its name meanwhile
        return 0


def _reason(error: Exception) -> str:
    """Return in a few words why the hub gave no model."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case GatedRepoError():
            return "the hub wants an account with access to it"
        case RevisionNotFoundError():
            return "the hub has no such revision of it"
        case RepositoryNotFoundError():
            return "the hub has no such model, or a private one"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set"
        case HFValidationError():
            return "it is no hub id"
    return first_line(error).rstrip(".")
