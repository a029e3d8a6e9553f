"""Every layer holds the same number of experts; what does not divide goes to the lower layers."""

from dataclasses import dataclass

from runtime.policies.base import SimpleResidency


@dataclass
class Uniform(SimpleResidency):
    """The whole budget is slots."""
