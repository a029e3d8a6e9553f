"""Presets: named sets of policies, one per axis, as `presets.toml` lists them."""

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Incompatible
from runtime.policies import POLICIES

_WHOLE = ("fetch", "near", "qstar", "cold")  # what becomes of a miss where nothing else stands in for it


class Scope(StrEnum):
    """Where an expert may take its slot: from its own layer's share, or from anywhere."""

    LAYER = "layer"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of policies, one per axis, with the paper it comes from and how it differs from that paper. The
    summary is of 42 characters at most, so that a table of all fits 80 columns.

    `budget` is given only if the preset fixes it. `is_study`: it is there to be compared with, not to run a model by.
    A preset that `waits_for` something cannot run; its axes name only the policies that exist. A tuned preset is
    `tuned_for` a budget and a machine, of the model `model_id`.
    """

    name: str
    summary: str
    paper: str
    routing: str = "standard"
    prefetch: str = "none"
    eviction: str = "lru"
    miss: str = "fetch"
    residency: str = "uniform"
    scope: str = "layer"
    budget: str | None = None
    differs: str = ""
    waits_for: str = ""
    is_study: bool = False
    tuned_for: str = ""
    model_id: str = ""

    @property
    def is_lossless(self) -> bool:
        """Whether it gives the full model's output: the model's own routing, every expert it wants, at full precision.
        `tests/runtime/policies` holds this to what the policies say of themselves."""
        return is_lossless(self.routing, self.miss, self.residency)

    def texts(self) -> dict[str, str]:
        return {axis: getattr(self, axis) for axis in POLICIES}


def is_lossless(routing: str, miss: str, residency: str) -> bool:
    """Return whether these policies never alter the output, whatever budget and text."""
    is_whole = miss.partition(":")[0] in _WHOLE and "avg_bits" not in residency
    return routing == "standard" and is_whole


@cache
def presets() -> dict[str, Preset]:
    """Return every preset by name, as `presets.toml` lists them, with those that cannot run yet."""
    rows = tomllib.loads(files("runtime.policies").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: Preset(name, **row) for name, row in rows.items()}


def preset(name: str | Preset) -> Preset:
    """Return the preset of a name; a preset from a store is returned unchanged. Raises BadUsage for an unknown name,
    Incompatible for a preset that waits for something."""
    if isinstance(name, Preset):
        return name
    if name not in presets():
        raise BadUsage(unknown("preset", name, presets()))
    chosen = presets()[name]
    if chosen.waits_for:
        raise Incompatible(
            f"preset {name} cannot run yet: it waits for {chosen.waits_for}; "
            "`moectl inspect presets` lists those that run"
        )
    return chosen
