"""The model that comes with moectl: where it is, and when a command takes it though another may have been meant."""

from importlib.resources import files
from pathlib import Path

BUNDLED = "bundled"


def demo_model() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(str(files("moectl").joinpath("demo")))


def as_named(name: str | None) -> str | None:
    """What stands for a model on a command line; None is the bundled one, which the word `bundled` names too."""
    return None if name == BUNDLED and not Path(name).exists() else name


def also_held(store: Path) -> str:
    """A sentence for whoever named no model though the store has artefacts of another; else nothing.

    A store that cannot be read is left to the command, which says so.
    """
    from artifacts.errors import Problem
    from artifacts.store.store import Store

    if not store.is_file():
        return ""
    try:
        with Store.open(store, read_only=True, patience_s=0) as held:
            others = [model.name for model in held.models() if not is_bundled(model.name)]
    except Problem:
        return ""
    return f"no model is named, so it is the bundled one; {store} also holds {others[-1]}" if others else ""


def is_bundled(name: str) -> bool:
    """By its folder, of whichever installation."""
    return Path(name).parts[-2:] == demo_model().parts[-2:]
