"""Words that the shell offers after an option. What lists them is imported when Tab is pressed, and
never torch."""

from collections.abc import Callable

Words = list[tuple[str, str]]  # each with a line about it, which zsh and fish show

BUDGETS = ("6.25%", "12.5%", "25%", "50%", "100%")
LINKS = ("auto", "disk", "direct", "cuda", "1GB/s", "5GB/s", "25GB/s+10us")
DEVICES = ("auto", "cpu", "cuda")


def presets() -> Words:
    """The presets that come with moectl and can run."""
    from runtime.policies.presets import presets as shipped

    return [(name, preset.summary) for name, preset in shipped().items() if not preset.waits_for]


def presets_or_auto() -> Words:
    return [("auto", "the best that loses nothing"), *presets()]


def policies(axis: str) -> Callable[[], list[str]]:
    """The policies of one axis."""

    def completed() -> list[str]:
        from runtime.policies import names

        return names(axis)

    return completed


def machines() -> Words:
    from artifacts.hardware.machines import MACHINES

    return [(machine.name, machine.source) for machine in MACHINES.values()]


def kinds_of_logs() -> Words:
    """The kinds of logs that `moectl import-trace` reads."""
    from artifacts.importers import KINDS

    return [(name, told) for name, (_, told) in KINDS.items()]


def models() -> list[str]:
    """The bundled model, and the models whose shapes are known."""
    from artifacts.modelshapes.known import MODELS

    return ["bundled", *MODELS]


def words(choices: tuple[str, ...]) -> Callable[[], list[str]]:
    return lambda: list(choices)


def listed(choices: Callable[[], Words]) -> Callable[[str], Words]:
    """Complete the last of several names separated by commas; names before it are not offered
    again."""

    def offered(incomplete: str) -> Words:
        before, comma, _ = incomplete.rpartition(",")
        return [
            (before + comma + word, line)
            for word, line in choices()
            if word not in before.split(",")
        ]

    return offered
