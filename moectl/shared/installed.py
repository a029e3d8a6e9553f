"""The packages that moectl needs, compared with the installed ones: read from metadata, so that
none of them is imported."""

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from artifacts.errors import Incompatible

# What each extra is for; those for working on moectl itself are left out.
EXTRAS = {
    "serve": "moectl serve",
    "eval": "moectl bench --tasks",
    "peers": "moectl bench --peers accelerate-disk and -cpu",
    "ray": "--executor ray, serve --replicas",
}


@dataclass(frozen=True, slots=True)
class Need:
    """A package, the versions of it that will do, and the version that is installed, if any."""

    name: str
    wanted: str
    found: str | None
    is_met: bool

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name} is missing"
        return (
            f"{self.name} {self.found}"
            if self.is_met
            else f"{self.name} {self.found} is not {self.wanted}"
        )


def needs(extra: str = "") -> list[Need]:
    """Return the needs of moectl itself, or of one of its extras. Nothing is known where its
    sources run without being installed."""
    found = (Requirement(text) for text in _required())
    return [_need(one) for one in found if _is_of(one, extra)]


def is_installed() -> bool:
    return bool(_required())


def check() -> None:
    """Raise Incompatible, with the command that mends it, where moectl itself cannot run."""
    unmet = [need for need in needs() if not need.is_met]
    if unmet:
        wanted = " ".join(f"'{need.name}{need.wanted}'" for need in unmet)
        raise Incompatible(f"{', '.join(map(str, unmet))}: pip install {wanted}")


def _required() -> list[str]:
    try:
        return metadata.requires("moectl") or []
    except metadata.PackageNotFoundError:
        return []


def _is_of(one: Requirement, extra: str) -> bool:
    is_core = one.marker is None or one.marker.evaluate({"extra": ""})
    return is_core if not extra else not is_core and one.marker.evaluate({"extra": extra})


def _need(one: Requirement) -> Need:
    try:
        found = metadata.version(one.name)
    except metadata.PackageNotFoundError:
        return Need(one.name, str(one.specifier), None, is_met=False)
    return Need(
        one.name, str(one.specifier), found, is_met=one.specifier.contains(found, prereleases=True)
    )
