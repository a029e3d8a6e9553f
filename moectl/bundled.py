"""The bundled model and traces: where they are, and how commands tell that a user may have meant
another."""

from importlib.resources import files
from pathlib import Path

BUNDLED = "bundled"


def demo_model() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(str(files("moectl").joinpath("demo")))


def bundled_trace(name: Path) -> Path | None:
    """The bundled trace of that name, which is the name of its model too; None for any other name,
    and for the name of a file."""
    path = Path(str(files("moectl").joinpath("traces", f"{name}.parquet")))
    return path if name.name == str(name) and path.is_file() and not name.exists() else None


def bundled_traces() -> list[str]:
    """The names of the bundled traces, in order."""
    folder = Path(str(files("moectl").joinpath("traces")))
    return sorted(path.stem for path in folder.glob("*.parquet"))


def as_named(name: str | None) -> str | None:
    """The model that a command line names; None is the bundled one, which the word `bundled` names
    too."""
    return None if name == BUNDLED and not Path(name).exists() else name


def also_held(store: Path) -> str:
    """A sentence for a user who named no model while the store holds artefacts of another; else an
    empty string.

    Errors of a store that cannot be read are left to the command.
    """
    if not store.is_file():
        return ""
    from artifacts.errors import Problem
    from artifacts.store.store import Store

    try:
        with Store.open(store, read_only=True, patience_s=0) as held:
            others = [model.name for model in held.models() if not is_bundled(model.name)]
    except Problem:
        return ""
    return (
        f"no model is named, so it is the bundled one; {store} also holds {others[-1]}"
        if others
        else ""
    )


def is_bundled(name: str) -> bool:
    """Return whether the name is the folder of a bundled model, of this installation or another."""
    return Path(name).parts[-2:] == demo_model().parts[-2:]
