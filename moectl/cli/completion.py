"""Words that the shell offers behind an option. What they come from is imported when Tab is pressed, never torch."""

from collections.abc import Callable, Iterator

Words = list[tuple[str, str]]  # each with a line on it, which zsh and fish show

BUDGETS = ("6.25%", "12.5%", "25%", "50%", "100%")
LINKS = ("auto", "disk", "direct", "cuda", "1GB/s", "5GB/s", "25GB/s+10us")
DEVICES = ("auto", "cpu", "cuda")


def presets() -> Words:
    """Those that come along and can run."""
    from runtime.policies.presets import presets as known

    return [(name, one.summary) for name, one in known().items() if not one.waits_for]


def policies(axis: str) -> Callable[[], list[str]]:
    """The names on one axis."""

    def known() -> list[str]:
        from runtime.policies import POLICIES

        return list(POLICIES[axis])

    return known


def machines() -> Words:
    from artifacts.hardware.machines import MACHINES

    return [(one.name, one.source) for one in MACHINES.values()]


def models() -> list[str]:
    """Those whose shapes are known, and the bundled one."""
    from artifacts.modelshapes.known import MODELS

    return ["bundled", *MODELS]


def words(known: tuple[str, ...]) -> Callable[[], list[str]]:
    return lambda: list(known)


def listed(known: Callable[[], Words | list[str]]) -> Callable[[str], Words]:
    """Of names separated by commas the one that is being written; those before it are not offered again."""

    def offered(incomplete: str) -> Words:
        before, comma, _ = incomplete.rpartition(",")
        return [(before + comma + word, line) for word, line in _lines(known()) if word not in before.split(",")]

    return offered


def _lines(known: Words | list[str]) -> Iterator[tuple[str, str]]:
    for one in known:
        yield (one, "") if isinstance(one, str) else one
