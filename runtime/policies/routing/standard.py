"""The router's own choice, untouched."""

from dataclasses import dataclass

from runtime.policies.base import Simple


@dataclass
class Standard(Simple):
    pass
