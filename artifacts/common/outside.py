"""Parts that other installed packages add by entry points."""

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from artifacts.errors import Incompatible


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the parts of a group by name; none is imported. Raises Incompatible where two packages
    have different ones of one name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other != entry:
            raise Incompatible(
                f"{entry.value} and {other.value} both are {entry.name} of {group}: uninstall the "
                "package of one"
            )
    return found


def load(kind: str, entry: EntryPoint, register: Callable[[Any], None]) -> None:
    """Import a part and register it. Raises Incompatible, with the `kind` of the part in its line,
    where either fails."""
    try:
        register(entry.load())
    except Exception as error:  # whatever another package does
        raise Incompatible(
            f"the {kind} cannot be imported from {entry.value}: {error!r}; mend or uninstall the "
            "package that has it"
        ) from error
