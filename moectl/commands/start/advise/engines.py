"""Engines that advice is given for: how they keep experts, and their flags."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine by name, in the version whose help and notes were read. `evicts` names the policy
    that chooses victims in one pool over all layers, which has so many classes."""

    name: str
    version: str
    evicts: str
    num_classes: int = 1


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("llama.cpp", "b12569", "class_lru", num_classes=8),
        Engine("freetoken", "0.2.0", "lru"),
    )
}
