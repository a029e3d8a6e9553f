"""Fields of a model's config that count something."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from artifacts.errors import BadInput

_LIMIT = 1 << 40  # the largest count that a config may hold


class Fields(NamedTuple):
    """The fields of the config at `path`."""

    config: Mapping
    path: Path

    def get(self, name: str) -> int:
        """Return a count, 0 where it is missing. Raises BadInput for a value that counts
        nothing."""
        value = self.config.get(name) or 0
        if not isinstance(value, int) or not 0 <= value < _LIMIT:
            raise BadInput(
                f"{self.path} has {name} {str(value)[:40]}, which counts nothing: download it again"
            )
        return int(value)

    def count(self, name: str) -> int:
        """Return a count that sizes follow from. Raises BadInput where it is missing too."""
        if number := self.get(name):
            return number
        raise BadInput(
            f"{self.path} has no {name}: what the model needs besides its experts cannot be told"
        )

    def counts(self, *names: str) -> list[int]:
        """Return several of them. Raises BadInput."""
        return [self.count(name) for name in names]
