"""Knowledge of moectl without a model: presets, policies and machines, as tables."""

import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.hardware.machines import MACHINES
from moectl.show.render import Sheet
from runtime.policies import POLICIES, build, find, names
from runtime.policies.presets import Preset
from runtime.policies.presets import presets as named_presets
from runtime.session.presets import tuned_presets


def presets(store: Path) -> Sheet:
    """The presets that come with moectl, then those that were tuned into the store."""
    columns = (
        "preset",
        *POLICIES,
        "scope",
        "needs",
        "waits for",
        "paper",
        "summary",
        "not as published",
        "tuned for",
    )
    rows = [
        (
            preset.name,
            *preset.texts().values(),
            preset.scope,
            ", ".join(sorted(build(preset.texts()).requires)) or None,
            preset.waits_for or None,
            preset.paper,
            preset.summary,
            preset.differs or None,
            preset.tuned_for or None,
        )
        for preset in (*named_presets().values(), *tuned_presets(store))
    ]
    note = (
        "A preset that waits for something cannot run yet; one that needs replicas runs after "
        "`moectl quantize`."
    )
    return Sheet("Presets", columns, rows, note)


def presets_in_brief(store: Path) -> list[Sheet]:
    """A line for each preset, those that lose nothing apart from the others."""
    every = [*named_presets().values(), *tuned_presets(store)]
    lossless, lossy = (
        [
            (preset.name, ", ".join(sorted(_artefacts(preset))) or None, preset.summary)
            for preset in every
            if kept(preset)
        ]
        for kept in (lambda preset: preset.is_lossless, lambda preset: not preset.is_lossless)
    )
    columns = ("preset", "needs", "what it does")
    note = (
        "`moectl inspect presets NAME` shows all of one: its policies, its paper, how it differs."
    )
    return [
        Sheet("Lossless: the full model's output", columns, lossless),
        Sheet("Lossy: faster or smaller, and the output changes", columns, lossy, note),
    ]


def one_preset(name: str, store: Path) -> tuple[Sheet, Sheet]:
    """The row of one preset, and the same from top to bottom. Raises BadUsage for an unknown
    name."""
    sheet = presets(store)
    rows = {row[0]: row for row in sheet.rows}
    if name not in rows:
        raise BadUsage(unknown("preset", name, rows))
    said = [
        (column, value) for column, value in zip(sheet.columns, rows[name], strict=True) if value
    ]
    return replace(sheet, rows=[rows[name]]), Sheet("Preset", ("", name), said[1:])


def _artefacts(preset: Preset) -> set[str]:
    """Return the artefacts that the store must hold, each by the word of the command that makes
    it."""
    return build(preset.texts()).requires - {
        "entropy"
    }  # which comes with the profile that buddies are built from


def policies(store: Path) -> Sheet:
    rows = [
        (
            axis,
            name,
            ", ".join(f"{parameter.name}={parameter.default}" for parameter in fields(kind)) or "-",
            _summary(kind),
        )
        for axis in POLICIES
        for name in names(axis)
        for kind in [find(axis, name)]
    ]
    return Sheet("Policies", ("axis", "policy", "parameters", "what it does"), rows)


def _summary(kind: type) -> str:
    """The first paragraph of the docstring of the policy's module."""
    return (sys.modules[kind.__module__].__doc__ or "-").strip().split("\n\n")[0].replace("\n", " ")


def machines(store: Path) -> Sheet:
    columns = (
        "machine",
        "fast GB/s",
        "fast TFLOPS",
        "link GB/s",
        "link latency us",
        "near GB/s",
        "near TFLOPS",
        "fast GB",
        "near GB",
        "source",
    )
    rows = [
        (
            name,
            machine.fast_gbps,
            machine.fast_tflops if math.isfinite(machine.fast_tflops) else None,
            machine.link_gbps,
            machine.link_latency_s * 1e6,
            machine.near_gbps,
            machine.near_tflops if math.isfinite(machine.near_tflops) else None,
            machine.fast_gb,
            machine.near_gb,
            machine.source,
        )
        for name, machine in MACHINES.items()
    ]
    return Sheet("Machines", columns, rows)


KNOWLEDGE: dict[str, Callable[[Path], Sheet]] = {
    "presets": presets,
    "policies": policies,
    "machines": machines,
}
"""By the name that `moectl inspect` takes. Presets come from the store too; the others do not read
it."""
