"""Presets: named sets of policies, one per axis, as `presets.toml` lists them."""

import tomllib
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage, Incompatible
from runtime.policies import POLICIES, describe, parse

TUNED = "tuned"  # what `moectl tune` calls its preset unless it is told another name
_WHOLE = (
    "fetch",
    "near",
    "qstar",
    "behind",
    "share",
    "hybrid",
    "cold",
)  # what becomes of a miss where nothing else stands in for it

CANDIDATES = (
    "on-demand:eviction=late_horizon",
    "on-demand",
    "horizon",
    "behind",
)
"""What `auto` chooses from where a part of the experts does not fit; of equally fast ones it takes
the first. All lose nothing and need no artefact."""


class Scope(StrEnum):
    """Slots that an expert may take: those of its own layer's share, or any."""

    LAYER = "layer"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of policies, one per axis, with the paper it comes from and how it differs from
    that paper. The summary is of 42 characters at most, so that a table of all fits 80 columns.

    `budget` is given only if the preset fixes it. `is_study`: it is there to be compared with, not
    to run a model by. A preset that `waits_for` something cannot run; its axes name only the
    policies that exist. A tuned preset is `tuned_for` a budget and a machine, of the model
    `model_id`. A `note` says what was not looked at for the choice.
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
    note: str = ""

    @property
    def is_lossless(self) -> bool:
        """True if the preset gives the full model's output: the model's own routing, every expert
        it wants, at full precision. `tests/runtime/policies` checks this against what the policies
        say of themselves."""
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
    rows = tomllib.loads(
        files("runtime.policies").joinpath("presets.toml").read_text(encoding="utf-8")
    )
    return {name: Preset(name, **row) for name, row in rows.items()}


def preset(name: str | Preset) -> Preset:
    """Return the preset of a name, or of `name:parameter=value,...` with those parameters of its
    policies; where an axis stands for a parameter, with that policy instead. A preset from a store
    is returned unchanged.

    Raises BadUsage for an unknown name or parameter, Incompatible for a preset that waits for
    something.
    """
    if isinstance(name, Preset):
        return name
    if name == TUNED:
        raise BadUsage(f"there is no preset {TUNED} in the store: `moectl tune` makes it")
    base, _, options = name.partition(":")
    if base not in presets():
        raise BadUsage(unknown("preset", base, presets()))
    chosen = presets()[base]
    if chosen.waits_for:
        raise Incompatible(
            f"preset {name} cannot run yet: it waits for {chosen.waits_for}; "
            "`moectl inspect presets` lists those that run"
        )
    return _changed(chosen, name, options.split(",")) if options else chosen


def _changed(chosen: Preset, name: str, options: list[str]) -> Preset:
    """Return the preset with `options`: each a policy of an axis, or a parameter of one of its
    policies as they are by then."""
    policies = {axis: parse(axis, text) for axis, text in chosen.texts().items()}
    for option in options:
        parameter, _, value = option.partition("=")
        if parameter in policies:
            policies[parameter] = parse(parameter, value)
            continue
        known = [
            (axis, field.name) for axis, policy in policies.items() for field in fields(policy)
        ]
        axes = [axis for axis, field in known if field == parameter]
        if not axes:
            raise BadUsage(
                unknown(f"parameter of {chosen.name}", parameter, [field for _, field in known])
            )
        if len(axes) > 1:
            each = " or ".join(f"--{axis}" for axis in axes)
            raise BadUsage(
                f"{name}: {parameter} is a parameter of several policies, so give it by {each}"
            )
        [axis] = axes
        text = describe(policies[axis])
        policies[axis] = parse(axis, f"{text}{',' if ':' in text else ':'}{option}")
    return replace(
        chosen, name=name, **{axis: describe(policy) for axis, policy in policies.items()}
    )
