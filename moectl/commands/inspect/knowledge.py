"""What moectl knows without a model: presets, policies and machines, as tables."""

import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from artifacts.hardware.machines import MACHINES
from moectl.show.render import Sheet
from runtime.policies import POLICIES, build
from runtime.policies.presets import presets as named_presets
from runtime.session.presets import tuned_presets


def presets(store: Path) -> Sheet:
    """The presets that come with moectl, then those that were tuned into the store."""
    columns = ("preset", *POLICIES, "scope", "needs", "waits for", "paper", "summary", "not as published", "tuned for")
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
    note = "What waits for something cannot run yet; what needs replicas runs after `moectl quantize`."
    return Sheet("Presets", columns, rows, note)


def policies(store: Path) -> Sheet:
    rows = [
        (
            axis,
            name,
            ", ".join(f"{parameter.name}={parameter.default}" for parameter in fields(kind)) or "-",
            _summary(kind),
        )
        for axis, kinds in POLICIES.items()
        for name, kind in kinds.items()
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


KNOWLEDGE: dict[str, Callable[[Path], Sheet]] = {"presets": presets, "policies": policies, "machines": machines}
"""By the name that `moectl inspect` takes. Presets come from the store too; the others do not read it."""
