"""Provenance: the model that an artefact belongs to, and the run that wrote it."""

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.shape import Shape

_PACKAGES = (
    "moectl",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "duckdb",
    "numba",
    "numpy",
    "pyarrow",
    "safetensors",
    "triton",
)
_ROOT = Path(__file__).parents[2]  # where this moectl lies


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect results, as far as they are installed,
    and the commit of a moectl that was installed from a repository or runs in one."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    """Looked up once per process: it takes 20 ms, and every stored run records it."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = _commit(_ROOT / ".git") or _installed_commit()
    return installed | ({"commit": commit} if commit else {})


def _commit(git: Path) -> str | None:
    """The commit that a checkout is at, uncommitted changes aside; None where there is none."""
    try:
        if git.is_file():  # a worktree names its folder
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        shared = (
            git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        )
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (shared / name).exists():
            return (shared / name).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
    except (OSError, UnicodeDecodeError):
        return None


def _installed_commit() -> str | None:
    """The commit that pip took moectl from, as it notes for an address of a repository."""
    try:
        noted = metadata.distribution("moectl").read_text("direct_url.json")
        return json.loads(noted or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError):
        return None


def utc_now() -> datetime:
    """The current time in UTC without a zone, as the store keeps it."""
    return datetime.now(UTC).replace(tzinfo=None)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as artefacts refer to it; `name` is what the user called it and may differ between
    machines."""

    name: str
    fingerprint: str
    family: str
    shape: Shape

    @property
    def model_id(self) -> str:
        return self.fingerprint[:16]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One command that wrote artefacts. `model_id` is None where no model was involved.

    `data` is the specification that the user gave and `data_digest` a hash of the token stream it
    became; `parameters` are the options in force, JSON values only. `started_at` is in UTC without
    a zone.
    """

    command: str
    model_id: str | None
    started_at: datetime
    seconds: float
    data: str = ""
    data_digest: str = ""
    tokens: int = 0
    seed: int = 0
    parameters: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)


@dataclass(frozen=True, slots=True)
class TableSize:
    """Rows of an artefact, and their bytes before the store compressed them."""

    num_rows: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A complete run as the store holds it, with the size of each table that it wrote."""

    run_id: int
    info: RunInfo
    contents: Mapping[str, TableSize]


@contextmanager
def as_written(run: StoredRun, where: Path) -> Iterator[None]:
    """Raise BadInput when the block finds that a run's parameters are not the ones that its command
    writes."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(
            f"{where} is damaged: run {run.run_id} has not the parameters that {run.info.command} "
            "writes; run it again"
        ) from error
