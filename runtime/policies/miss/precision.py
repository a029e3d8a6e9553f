"""What miss policies that pick precisions ask of the replicas."""

from artifacts.errors import Incompatible
from artifacts.shape import FULL_BITS
from runtime.policies.base import Artefacts


def check_replicas(name: str, artefacts: Artefacts, *needed: int) -> None:
    """Raise Incompatible when a precision that a policy picks was not built."""
    for bits in needed:
        if bits not in artefacts.replicas.nbytes:
            replicas = artefacts.replicas
            there = ", ".join(map(str, sorted(replicas.nbytes)))
            if replicas.base != FULL_BITS:
                there = f"{', '.join(map(str, replicas.widths)) or 'none'} below a base of {replicas.base}"
            raise Incompatible(f"{name} needs replicas of {bits} bits; there are {there}: build them or pick of these")
