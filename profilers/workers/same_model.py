"""A model that every worker opens by its name, and that has to be the same one everywhere."""

import socket
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import Incompatible
from runtime.devices import resolve_device
from runtime.model.open import MoeModel, open_model


@dataclass(frozen=True, slots=True)
class SameModel:
    """The model that the process which submits tasks has opened by `name`."""

    name: str
    fingerprint: str

    @classmethod
    def of(cls, name: str, opened: MoeModel) -> "SameModel":
        """A folder is named from the root on: workers run in folders of their own."""
        return cls(str(Path(name).resolve()) if Path(name).exists() else name, opened.fingerprint)

    def open(self, *, device: str = "cpu", dense: int | None = None) -> MoeModel:
        """Open it on a device of this machine. Raises Incompatible where the name leads to another
        model."""
        opened = open_model(self.name, device=resolve_device(device), dense=dense)
        if opened.fingerprint != self.fingerprint:
            raise Incompatible(
                f"on {socket.gethostname()} {self.name} is another model: every node needs the "
                "same checkpoint under the same name"
            )
        return opened
