"""What stops every command: Windows, and other distributions that own a top-level name of ours
(`artifacts` and `runtime` are names that others use too).

Only the standard library is imported here: this is asked before the first import of `artifacts`.
"""

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("artifacts", "runtime", "profilers")
# the exit code of artifacts.errors.Incompatible, which may not be importable here
_INCOMPATIBLE = 5
_WINDOWS = "Windows has no file locks and reads that moectl needs: use it in WSL (`wsl --install`)"
REMEDY = "install moectl in a virtual environment of its own"


def refuse_surroundings() -> None:
    """Exit with one line on stderr and code 5 on Windows, or where Python would import another
    distribution's package for ours."""
    problem = _WINDOWS if sys.platform == "win32" else foreign()
    if problem:
        print(f"moectl: {problem}", file=sys.stderr)
        raise SystemExit(_INCOMPATIBLE)


def foreign() -> str | None:
    """Return a sentence on the first of the three packages that did not come with moectl: its name,
    its owner, its place and the remedy. Return None if all are ours."""
    home = Path(__file__).parents[3]
    for name in PACKAGES:
        spec = find_spec(name)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).parents[1] != home:
            return (
                f"the package {name} that Python finds ({origin or 'none'}) is that of "
                f"{_owner(name)}, not moectl's: {REMEDY}"
            )
    try:
        from artifacts.errors import Problem  # noqa: F401
    except ImportError:
        return (
            f"files of the package artifacts in {home} are those of {_owner('artifacts')}, not "
            f"moectl's: {REMEDY}"
        )
    return None


def sharing() -> dict[str, list[str]]:
    """Return the other installed distributions that own files under a package of ours, with their
    versions, by package name."""
    owners = metadata.packages_distributions()
    others = {
        name: sorted({owner for owner in owners.get(name, []) if owner != "moectl"})
        for name in PACKAGES
    }
    return {
        name: [f"{owner} {metadata.version(owner)}" for owner in found]
        for name, found in others.items()
        if found
    }


def _owner(name: str) -> str:
    owners = sharing().get(name)
    return ", ".join(owners) if owners else "another distribution"
