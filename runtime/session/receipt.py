"""What was really in force in a run."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime.control import split_solver as solving
from runtime.kernels.low_bit import kernel_name
from runtime.policies import POLICIES, describe
from runtime.policies.presets import preset

if TYPE_CHECKING:
    from runtime.session.session import Session


def receipt(session: "Session") -> dict[str, object]:
    """By name, as it is printed and stored."""
    cache = session.controller.cache
    return {
        "model": session.opened.config.name_or_path or session.opened.family,
        "family": session.opened.family,
        "dtype": str(session.opened.dtype).removeprefix("torch."),
        "base_bits": session.opened.base,
        "device": str(session.opened.model.device),
        "devices": _devices(session),
        "threads": torch.get_num_threads(),
        "preset": preset(session.settings.preset).name,
        "tuned_for": preset(session.settings.preset).tuned_for,
        "policies": {axis: describe(getattr(session.policies, axis)) for axis in POLICIES},
        "experts_of_a_token": session.fused.name if session.is_fused else "torch",
        "scope": str(session.scope),
        "slots": cache.num_slots,
        "experts": cache.shape.num_keys,
        "expert_bytes": cache.shape.expert_nbytes,
        "fast_bytes": session.slots.nbytes + (session.shadows.nbytes if session.shadows else 0),
        "split": solving.receipt(session.fast.split, session.opened.shape),
        "reconfigured": session.reconfiguration.receipt() if session.reconfiguration else {},
        "replicas": _replicas(session),
        "predictors": session.watcher.predictor.receipt() if session.watcher.predictor else {},
        "maps": session.matching.receipt() if session.matching else {},
        "pinned_bytes": session.tiers.pinned_nbytes,
        "prefetch_window_bytes": session.window,
        "link": session.tiers.link.conditions(),
        "near": session.tiers.near.conditions(),
        "scaled_to": session.settings.scaled_to,
        "fallbacks": list(session.fallbacks),
    }


def _devices(session: "Session") -> dict[str, object]:
    """By name, what each device has and did, where there are several; parts of one are numbered."""
    devices, found = session.devices, session.controller.by_device()
    is_one = len(set(devices)) == 1
    names = [f"{device} part {number}" if is_one else f"{device}" for number, device in enumerate(devices)]
    return dict(zip(names, found, strict=False))


def _replicas(session: "Session") -> dict[str, object]:
    """What is computed below full precision, where, and by which kernel; and how many experts that counted as
    resident were computed so all the same, because they had not landed."""
    if not session.computed_widths:
        return {}
    shadows = session.controller.cache.shadows
    bits, counts = np.unique(shadows, return_counts=True) if shadows is not None else ((), ())
    return {
        "slow_tier_bits": [f"{width}" for width in session.policies.widths],
        "resident": {f"{width}_bits": int(count) for width, count in zip(bits, counts, strict=True)},
        "resident_bytes": session.shadows.nbytes if session.shadows else 0,
        "not_landed": session.engine.steps.num_not_landed,
        "verified": session.settings.verify,
        "kernel": kernel_name(session.opened.model.device),
    }
