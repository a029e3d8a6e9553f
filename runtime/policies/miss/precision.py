"""What miss policies that pick precisions ask of the replicas."""

from artifacts.errors import Incompatible
from runtime.policies.base import Artefacts


def check_replicas(name: str, artefacts: Artefacts, *needed: int) -> None:
    """Raise Incompatible when a precision that a policy picks was not built."""
    for bits in needed:
        if bits not in artefacts.replicas.nbytes:
            there = ", ".join(map(str, sorted(artefacts.replicas.nbytes)))
            raise Incompatible(f"{name} needs replicas of {bits} bits; there are {there}: build them or pick of these")
