"""One text with a name: what every source of text yields."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """`name` says where the text is from and stays the same from run to run."""

    name: str
    text: str
