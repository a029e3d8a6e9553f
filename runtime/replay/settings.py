"""The setting of a replay, and its outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from runtime.control.counters import hit_rate
from runtime.control.serving import Service
from runtime.policies import Policies, as_texts, build
from runtime.policies.presets import Preset, Scope, preset
from runtime.replay.virtual_time import PassTime


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of one replay. `policies` overrides axes of the preset; a preset's own scope and
    budget apply where it has them."""

    label: str
    preset: str | Preset = "on-demand"
    policies: Mapping[str, Any] = field(default_factory=dict)  # by axis: text, or a policy object
    scope: str | None = None
    budget: str = "25%"
    reconfigure_every: int | None = None
    devices: int = 1  # that experts are spread over
    serving: str = str(Service.PINNED)

    def texts(self) -> dict[str, str]:
        """Return the policy text of every axis."""
        return preset(self.preset).texts() | as_texts(self.policies)

    def build(self) -> Policies:
        """Build the policies. Raises BadUsage for an unknown name or parameter."""
        return build(self.texts())


def oracles(setting: Setting) -> tuple[Setting, Setting]:
    """Return the bounds of a setting: Belady with demand loads only, and with perfect
    prefetching."""
    scope = setting.scope or preset(setting.preset).scope
    plain = {
        "scope": scope,
        "budget": setting.budget,
        "devices": setting.devices,
        "serving": setting.serving,
    }
    return (
        Setting("belady", policies={"eviction": "belady"}, **plain),
        Setting("oracle", policies={"eviction": "belady", "prefetch": "oracle"}, **plain),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay: counters over all passes, by layer and over the passes that decode,
    times as `ReplayTiming.summary` gives them, and the hits, requests and times of each pass.

    `num_slots`: in whole experts; where experts are split, as many as the slots' bytes would hold.
    `fast_nbytes`: slots and resident replicas together. `split`: how experts are cut, and what
    solved it. `by_device`: slots and counters of each device where there are several.
    """

    setting: Setting
    policies: dict[str, str]
    scope: Scope
    num_slots: int
    fast_nbytes: int
    window: int
    counters: dict[str, int]
    by_layer: list[dict[str, int]]
    decoding: dict[str, int]
    times: dict[str, float | None]
    hits_by_pass: list[tuple[int, int]]
    passes: list[PassTime]
    split: dict[str, object]
    by_device: list[dict[str, int]]

    @property
    def acceptance(self) -> float | None:
        """Share of drafts that were accepted; None where nothing was drafted."""
        drafted = self.counters["drafted"]
        return self.counters["accepted"] / drafted if drafted else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Decoded tokens of a pass that decodes; None where nothing was drafted."""
        if not self.counters["drafted"]:
            return None
        return fmean(one.num_decoded for one in self.passes if one.decodes)

    def row(self) -> dict[str, object]:
        """Return the outcome as a row of a table: its label, the hit rate, counters and times."""
        rate = {"hit_rate": hit_rate(self.counters)}
        return {"label": self.setting.label} | rate | self.counters | self.times
