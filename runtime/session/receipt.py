"""The receipt: everything that is really in force in a run, with all fallbacks, so that no fallback
is silent."""

import numpy as np
import torch

from artifacts.hardware import numa
from artifacts.modelshapes.kv_cache import AUTO
from artifacts.quantisation.widths import label
from artifacts.shape import FULL_BITS
from runtime.backends.choose import dequantised
from runtime.backends.cpu.forms_published import BLOCKS_OF_32
from runtime.control.splits import split_solver
from runtime.control.splits.resplit import NOT_ANEW, Reconfiguration, tokens_between
from runtime.devices import is_host, kind_of
from runtime.kernels.load import AS_NUMPY
from runtime.kernels.replica_linear import kernel_names
from runtime.model import huge_pages
from runtime.model.files.row_table import tables_of
from runtime.model.kv_cache import KvCoding
from runtime.model.open import MoeModel
from runtime.policies import POLICIES, describe
from runtime.policies.base import Origin
from runtime.policies.prefetch.draft import UNTOLD
from runtime.policies.presets import preset
from runtime.session.parts import Parts
from runtime.session.settings import DEVICE, FUSED, HOST


def receipt(
    parts: Parts,
    reconfiguration: Reconfiguration | None,
    *,
    coding: KvCoding | None = None,
    fallbacks: list[str],
) -> dict[str, object]:
    """Return the entries of the receipt by name, as they are printed and stored."""
    opened = parts.opened
    policies = parts.policies
    settings = parts.settings
    cache = parts.controller.cache
    return {
        "model": opened.config.name_or_path or opened.family,
        "family": opened.family,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "base_bits": opened.base,
        "expert_format": opened.expert_format,
        "device": str(opened.model.device),
        "devices": _devices(parts),
        "threads": {"torch": torch.get_num_threads(), "compiled": parts.threads.num_used},
        "preset": preset(settings.preset).name,
        "tuned_for": preset(settings.preset).tuned_for,
        "policies": {axis: describe(getattr(policies, axis)) for axis in POLICIES},
        "decide": DEVICE if parts.engine.road else HOST,
        "experts_of_a_token": parts.fused.name if parts.is_fused else "torch",
        "kv_cache": _kv_cache(coding),
        "activations": _activations(opened),
        "captured": _captured(parts),
        "dense": _dense(opened),
        "tables": _tables(opened),
        "compiled": parts.dense.receipt() if parts.dense else {},
        "scope": str(parts.scope),
        "slots": cache.num_slots,
        "experts": cache.shape.num_keys,
        "expert_bytes": cache.shape.expert_nbytes,
        "fast_bytes": parts.fast_nbytes,
        "split": split_solver.receipt(parts.fast.split, opened.shape),
        "reconfigured": reconfiguration.receipt() if reconfiguration else {},
        "artefacts": {name: _origin(origin) for name, origin in _used(parts).items()},
        "replicas": _replicas(parts),
        "predictors": parts.watcher.predictor.receipt() if parts.watcher.predictor else {},
        "maps": policies.matching.receipt() if policies.matching else {},
        "huge_pages": {"mode": huge_pages.mode()} | huge_pages.shares(parts.memory),
        "numa": _numa(parts),
        "pinned_bytes": parts.tiers.pinned_nbytes,
        "prefetch_window_bytes": parts.window,
        "link": parts.tiers.link.conditions(),
        "near": parts.tiers.near.conditions(),
        "scaled_to": settings.scaled_to,
        "fallbacks": [*fallbacks, *_launched_singly(parts), *_untold(parts)],
    }


def _kv_cache(coding: KvCoding | None) -> dict[str, object]:
    """Return the type of keys and values, how many layers keep theirs so, and how many do not."""
    if coding is None:
        return {"dtype": AUTO}
    others = coding.num_others
    return {"dtype": f"int{coding.bits}", "layers": len(coding.layers), "other_layers": others}


def _kv_fallbacks(coding: KvCoding, *, is_fused: bool) -> list[str]:
    """Return a line for what keys and values at few bits leave out."""
    lines = []
    if coding.num_others:
        lines.append(
            f"kv cache: {coding.num_others} layers that keep windows, states or an index keep them "
            "as computed"
        )
    if is_fused:
        lines.append("kv cache: torch attends to keys and values of few bits, no compiled kernel")
    return lines


def _numa(parts: Parts) -> dict[str, object]:
    """Return the number of nodes with memory and, where there are several, the policy that is in
    force for each kind of memory."""
    nodes = numa.nodes_with_memory()
    memory = parts.memory if len(nodes) > 1 else {}
    policies = {name: numa.policy_of(held[0].data_ptr()) for name, held in memory.items()}
    return {"nodes": len(nodes)} | policies


def _activations(opened: MoeModel) -> dict[str, object]:
    """Return to how many bits tokens are rounded for which expert formats, and which others take
    them as computed, and the number of linear layers that round; empty where nothing does."""
    if opened.activations is None:
        return {}
    layout = opened.store.layout
    layouts = layout.variants if layout.codes == "mixed" else (layout,)
    parts = [part.format for each in layouts for part in each.parts if part.format]
    formats = sorted({form.name for form in parts} or {layout.format})
    return {
        "bits": opened.activations,
        "experts": [name for name in formats if name in BLOCKS_OF_32],
        "other_experts": [name for name in formats if name not in BLOCKS_OF_32],
        "linear_layers": opened.dense.num_packed if opened.dense else 0,
    }


def _rounding_fallbacks(opened: MoeModel) -> list[str]:
    """Return a line on what multiplies tokens as computed, although rounding was asked for."""
    if others := _activations(opened).get("other_experts"):
        return [f"activations: experts in {', '.join(others)} multiply tokens as computed"]
    return []


def _used(parts: Parts) -> dict[str, Origin]:
    """Return the artefacts that the policies or the base use, with the runs that wrote them."""
    wanted = {*parts.policies.wants, *(["replicas"] if parts.opened.base != FULL_BITS else [])}
    return {name: origin for name, origin in sorted(parts.origins.items()) if name in wanted}


def _origin(origin: Origin) -> dict[str, object]:
    return {"run": origin.run, "command": origin.command, "data_digest": origin.data_digest}


def _captured(parts: Parts) -> dict[str, object]:
    """Return the number of tokens that were replayed as CUDA graphs, with further figures on them;
    empty where there are no graphs."""
    return parts.engine.captured.receipt() if parts.engine.captured else {}


def _launched_singly(parts: Parts) -> list[str]:
    captured = _captured(parts)
    lines = []
    if reason := captured.get("why_not"):
        lines.append(f"decoded tokens are launched one by one, not as CUDA graphs: {reason}")
    return lines + [
        f"passes of {count} tokens are launched kernel by kernel, not as CUDA graphs: {reason}"
        for count, reason in sorted(captured.get("wide_why_not", {}).items())
    ]


def _untold(parts: Parts) -> list[str]:
    """Return a line where drafts have told the prefetch policy nothing that reads what they
    tell."""
    if not parts.policies.prefetch.reads_foretold or parts.watcher.num_foretold:
        return []
    return [UNTOLD] * (parts.controller.now.pass_index > 0)  # behind the prompt


def _dense(opened: MoeModel) -> dict[str, object]:
    """Return the bytes of all weights besides experts, and the numbers of linear layers at few bits
    and as published."""
    held = sum(each.nbytes for each in opened.model.parameters() if not each.is_meta)
    width = opened.dense
    few = (
        {}
        if width is None
        else {"bits": width.bits, "matrices": width.num_packed, "as_published": width.num_left}
    )
    return {"bytes": held} | few


def _tables(opened: MoeModel) -> dict[str, object]:
    """Return the bytes of the tables that stay in files, those of their rows that are kept in
    memory, and the rows that were read from files and found in memory since the model was opened;
    empty if it has none."""
    tables = tables_of(opened.model)
    if not tables:
        return {}
    return {
        "bytes": sum(table.nbytes for table in tables),
        "kept_bytes": sum(table.kept_nbytes for table in tables),
        "rows_read": sum(table.num_read for table in tables),
        "rows_kept": sum(table.num_kept for table in tables),
    }


def _devices(parts: Parts) -> dict[str, object]:
    """Return the contents and counters of each of several devices, by the device's name; parts of
    one device are numbered."""
    is_one = len(set(parts.devices)) == 1
    names = [
        f"{device} part {number}" if is_one else f"{device}"
        for number, device in enumerate(parts.devices)
    ]
    return dict(zip(names, parts.controller.by_device(), strict=False))


def _replicas(parts: Parts) -> dict[str, object]:
    """Return which experts are computed below full precision, where, and by which kernel; empty if
    none are. `not_landed` counts the resident experts that were computed on their low replica
    because their transfer had not landed."""
    if not parts.computed_widths:
        return {}
    shadows = parts.controller.cache.shadows
    bits, counts = np.unique(shadows, return_counts=True) if shadows is not None else ((), ())
    return {
        "slow_tier_bits": [f"{width}" for width in parts.policies.widths],
        "resident": {
            f"{label(width)}_bits": int(count) for width, count in zip(bits, counts, strict=True)
        },
        "resident_bytes": parts.shadows.nbytes if parts.shadows else 0,
        "not_landed": parts.engine.steps.num_not_landed,
        "verified": parts.settings.verify,
        "code": " and ".join(
            ["packed"] * bool(parts.packed_widths) + ["trellis"] * parts.has_trellis
        ),
        "kernel": kernel_names(
            parts.opened.model.device,
            has_packed=bool(parts.packed_widths),
            has_trellis=parts.has_trellis,
        ),
    }


def _dense_fallbacks(opened: MoeModel, *, is_multiplied: bool) -> list[str]:
    """Return a line for each way in which the dense weights are not as asked: layers that stay as
    published, and products of dequantised ones."""
    width = opened.dense
    lines = []
    if width.num_left:
        lines.append(
            f"dense: {width.num_left} linear layers stay as published: too small, or no whole "
            "blocks of 32"
        )
    device = opened.model.device
    if not is_host(device) or not is_multiplied:
        why = (
            "--experts fused multiplies where it lies" if is_host(device) else "there is no kernel"
        )
        lines.append(
            f"dense: {width.bits} bits are dequantised at each use on {kind_of(device)}: {why}"
        )
    return lines


def fallbacks_of(parts: Parts, coding: KvCoding | None = None) -> list[str]:
    """Return a line for each thing that the session does otherwise than it was asked; those of the
    policies come first."""
    opened = parts.opened
    devices = parts.devices
    num_devices = parts.settings.devices
    lines = [*parts.policies.fallbacks, *filter(None, [preset(parts.settings.preset).note])]
    lines += dict.fromkeys(origin.note for origin in _used(parts).values() if origin.note)
    if parts.settings.experts == FUSED and not parts.is_fused:
        where = f"{num_devices} devices" if num_devices > 1 else kind_of(opened.model.device)
        lines.append(f"experts of {opened.family} on {where} are not fused: torch computes")
    if parts.is_fused and (line := dequantised(parts.fused, opened)):
        lines.append(line)
    if coding:
        lines += _kv_fallbacks(coding, is_fused=parts.dense is not None)
    lines += _rounding_fallbacks(opened)
    if opened.dense:
        lines += _dense_fallbacks(
            opened, is_multiplied=parts.dense is not None and opened.dtype in AS_NUMPY
        )
    if num_devices > 1 and len(set(devices)) == 1:
        lines.append(f"devices: {num_devices} parts of {devices[0]} in the place of GPUs")
    if num_devices > 1 and tokens_between(None, parts.fast.split, parts.policies):
        lines.append(NOT_ANEW)
    if parts.fast.split and parts.link.kind == "disk":
        lines.append("link disk reads more than a segment for each: use a link from RAM")
    if parts.fast.holds(opened.shape) and parts.settings.budget != "100%":
        lines.append(f"budget {parts.budget} holds the whole model: every expert stays resident")
    return [*lines, *opened.unfollowed]
