"""Fixtures of the studies: a small model, and commands that print no progress."""

from tests.moectl.conftest import however_slowly, said
from tests.profilers.conftest import folder, opened

__all__ = ["folder", "however_slowly", "opened", "said"]
