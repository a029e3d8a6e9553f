"""The model that comes with moectl."""

from importlib.resources import files
from pathlib import Path


def demo_model() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(str(files("moectl").joinpath("demo")))
