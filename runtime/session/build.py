"""Builds the parts of a session, in the order in which they need each other: policies and fast
tier, slots, tiers, controller, router hooks, engine."""

from contextlib import ExitStack
from dataclasses import fields, replace

import torch

from artifacts.errors import BadUsage
from artifacts.hardware.costs import rounded_ratio
from artifacts.hardware.machines import HERE, machine
from artifacts.quantisation.widths import NOTHING
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.shape import FULL_BITS
from runtime.backends.backend import Backend
from runtime.backends.choose import choose_backend, open_backend
from runtime.backends.cpu.cpu_backend import CpuBackend
from runtime.control import sizes
from runtime.control.build import build_controller, fast_tier, lay_out, pools
from runtime.control.controller import Controller
from runtime.control.on_device import CacheOnDevice
from runtime.control.pools import Partitions
from runtime.devices import is_host, kind_of, spread_over
from runtime.drafters.base import NONE, Draft
from runtime.drafters.base import kind_of as drafter_of
from runtime.engine.engine import Engine
from runtime.engine.fitted_predictor import Predictor
from runtime.engine.router_ahead import reason_not_asked
from runtime.engine.routers import Watcher
from runtime.kernels.cpu.decoder.decoder import CompiledDecoder
from runtime.kernels.cpu.threads import KernelThreads
from runtime.kernels.gpu.dense.decoder import TritonDecoder
from runtime.kernels.replica_linear import make_ready
from runtime.model.open import MoeModel
from runtime.policies import POLICIES, Policies, build, describe
from runtime.policies.base import Artefacts, FastTier
from runtime.policies.prefetch.none import NoPrefetch
from runtime.policies.presets import Scope, preset
from runtime.session.generation.warm_up import warm_up
from runtime.session.link_choice import link_name, resolve_link
from runtime.session.parts import Choices, Parts
from runtime.session.probe import (
    link_bytes_per_second,
    near_bytes_per_second,
    prefetch_window,
    scaled_window,
)
from runtime.session.settings import AUTO, DEVICE, EXACT, FUSED, HOST, Settings
from runtime.tiers.fast import ResidentExperts
from runtime.tiers.open import Tiers, open_tiers
from runtime.tiers.replica_store import open_replicas, verify_files
from runtime.tiers.shadow_replicas import Shadows
from runtime.tiers.slots import Slots


def build_parts(
    opened: MoeModel, settings: Settings, artefacts: Artefacts, undo: ExitStack
) -> Parts:
    """Open every part and install the engine in the model. `undo` closes the opened parts, also
    where a later part fails. Raises BadUsage, BadInput, Incompatible and OutOfResources."""
    _check_opened_so(opened, settings.dense)
    opened = replace(opened, activations=settings.activations)
    if settings.verify and artefacts.replicas:
        verify_files(artefacts.replicas)
    artefacts = _with_maps_to_learn(opened, artefacts) if settings.learn else artefacts
    choices = _choose(opened, settings, artefacts, _open_threads(settings, undo))
    given_window = sizes.nbytes(settings.window) if settings.window else None
    slots = _open_slots(choices)
    shadows = _open_shadows(choices, slots, artefacts)
    tiers = _open_tiers(choices, artefacts, undo)
    window = _measured_window(choices, slots, tiers) if given_window is None else given_window
    window = whole_experts(choices, window)
    policies = choices.policies.with_ratio(lambda: _measured_ratio(choices, slots, tiers))
    choices = replace(choices, policies=policies)
    controller = _build_controller(choices, artefacts, window)
    watcher = _watch_routers(choices, artefacts, controller, undo)
    engine = Engine(
        opened,
        controller,
        watcher,
        tiers=tiers,
        slots=slots,
        shadows=shadows,
        threads=choices.threads,
        is_fused=choices.is_fused,
        on_device=cache_on_device(choices, controller),
        drafts=_open_drafts(choices),
    )
    parts = Parts(
        **{field.name: getattr(choices, field.name) for field in fields(choices)},
        slots=slots,
        shadows=shadows,
        tiers=tiers,
        window=window,
        controller=controller,
        watcher=watcher,
        engine=engine,
    )
    warm_up(parts)
    _install(parts, undo)
    make_ready(
        parts.packed_widths,
        has_trellis=parts.has_trellis,
        dtype=opened.dtype,
        device=opened.model.device,
    )
    return parts


def _check_opened_so(opened: MoeModel, dense: int | None) -> None:
    if dense is not None and (opened.dense is None or opened.dense.bits != dense):
        raise BadUsage(
            f"dense={dense} is a matter of opening: open_model(name, dense={dense}), or "
            "Session.open"
        )


def _open_threads(settings: Settings, undo: ExitStack) -> KernelThreads:
    """Open as many threads for compiled code as torch has; torch is first given the number of the
    settings, if they have one."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    threads = KernelThreads(torch.get_num_threads())
    undo.callback(threads.close)
    return threads


def _choose(
    opened: MoeModel, settings: Settings, artefacts: Artefacts, threads: KernelThreads
) -> Choices:
    chosen = preset(settings.preset)
    policies = _without_predictions(build(settings.texts()), opened)
    scope = Scope(settings.scope or chosen.scope)
    budget = chosen.budget or settings.budget
    partitions = Partitions(opened.shape.num_experts, settings.devices)
    devices = _devices_for(opened, settings.devices)
    fast = _choose_fast_tier(
        opened, settings, policies, scope=scope, budget=budget, artefacts=artefacts
    )
    if fast.split is not None and not opened.store.layout.is_plain:
        raise BadUsage(
            "split cuts experts by neuron, and this checkpoint has them packed: choose another "
            "--residency"
        )
    has_replicas = fast.shadows is not None or any(bits != FULL_BITS for bits in policies.widths)
    fused = choose_backend(opened, num_devices=settings.devices, has_replicas=has_replicas)
    is_asked = settings.experts != EXACT and fused is not None
    if opened.activations and not (is_asked and is_host(opened.model.device)):
        raise BadUsage(
            f"--activations 8 is of compiled kernels on a CPU, and {opened.family} on "
            f"{kind_of(opened.model.device)} runs without: leave it out"
        )
    link = resolve_link(
        opened,
        link=settings.link,
        near=settings.near,
        scaled_to=settings.scaled_to,
        is_fused=is_asked,
    )
    choices = Choices(
        opened=opened,
        settings=settings,
        policies=policies,
        scope=scope,
        budget=budget,
        partitions=partitions,
        devices=devices,
        fast=fast,
        fused=fused,
        # A split expert is the sum over its two halves, which differs from the module's bits in
        # torch too, and by more: compiled code computes it unasked on a CPU. The GPU's kernels are
        # used only when the user asks for them.
        is_fused=is_asked or fast.split is not None and fused is not None and fused.takes_splits,
        dense=open_decoder(opened, fused, threads) if is_asked else None,
        threads=threads,
        link=link,
        maps_run=artefacts.maps_run,
        origins=artefacts.origins,
    )
    return replace(choices, settings=_settled(choices))


def _settled(choices: Choices) -> Settings:
    """Return the settings with what runs in the place of each AUTO."""
    settings = choices.settings
    if settings.experts == AUTO:
        settings = replace(settings, experts=FUSED if choices.is_fused else EXACT)
    if settings.decide == AUTO:
        may_decide = settings.may_decide_on_device and not _reason_not_on_device(
            choices, choices.fast.num_slots
        )
        settings = replace(settings, decide=DEVICE if may_decide else HOST)
    return settings


def _open_drafts(choices: Choices) -> CompiledDecoder | None:
    """Return the compiled code of passes that draft, if the drafter has any: those of the experts
    that are there, whose bits need not be the model's own."""
    name = Draft.parse(choices.settings.draft).name
    reads_model = name != NONE and getattr(drafter_of(name), "reads_model", False)
    if not reads_model or choices.fused is not CpuBackend:
        return None
    return choices.dense or open_decoder(choices.opened, choices.fused, choices.threads)


def open_decoder(
    opened: MoeModel, fused: type[Backend], threads: KernelThreads
) -> CompiledDecoder | TritonDecoder:
    """Return compiled code for the modules beside the experts, which `fused` computes."""
    return TritonDecoder(opened) if fused.needs_no_host else CompiledDecoder(opened, threads)


def _devices_for(opened: MoeModel, count: int) -> tuple[torch.device, ...]:
    """Return the `count` devices over which the model's experts are spread, its own first. Raises
    BadUsage for experts that cannot be computed on another device."""
    devices = spread_over(opened.model.device, count)
    if len(set(devices)) > 1 and getattr(opened.layers[0].experts, "has_post_expert_norm", False):
        raise BadUsage(
            f"experts of {opened.family} share a norm, which is on one GPU: leave out --devices"
        )
    return devices


def _without_predictions(policies: Policies, opened: MoeModel) -> Policies:
    """Return the policies, without a prefetch policy that reads predictions where the model's
    routers give none. Raises BadUsage where results depend on predictions."""
    reason = reason_not_asked(opened) if policies.prefetch.reads_predictions else None
    if reason is None:
        return policies
    if policies.routing.follows_predictions:
        raise BadUsage(f"--routing {describe(policies.routing)} follows predictions: {reason}")
    none = NoPrefetch()
    none.fallbacks = (f"--prefetch none instead of {describe(policies.prefetch)}: {reason}",)
    return replace(policies, prefetch=none)


def _choose_fast_tier(
    opened: MoeModel,
    settings: Settings,
    policies: Policies,
    *,
    scope: Scope,
    budget: str,
    artefacts: Artefacts,
) -> FastTier:
    named_machine = settings.machine or settings.scaled_to
    return fast_tier(
        policies,
        opened.shape,
        budget,
        scope=scope,
        artefacts=artefacts,
        machine=named_machine or HERE,
        link=None if named_machine else link_name(opened, settings.link),
        num_devices=settings.devices,
    )


def _with_maps_to_learn(opened: MoeModel, artefacts: Artefacts) -> Artefacts:
    """Return the artefacts with the expert maps that the run adds to: empty ones if there are
    none."""
    shape = opened.shape
    hidden = opened.model.get_input_embeddings().weight.shape[1]
    empty = ExpertMaps.empty(
        num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=hidden
    )
    return replace(
        artefacts, maps=empty if artefacts.maps is None else artefacts.maps, learns_maps=True
    )


def _open_slots(choices: Choices) -> Slots:
    opened = choices.opened
    fast = choices.fast
    shared = pools(
        choices.policies,
        opened.shape,
        num_slots=fast.num_slots,
        scope=choices.scope,
        split=fast.split,
        partitions=choices.partitions,
    )
    layout = opened.store.layout
    return Slots(
        shared,
        choices.devices,
        parts=layout.parts if layout.is_plain and not choices.is_fused else (),
    )


def _open_shadows(choices: Choices, slots: Slots, artefacts: Artefacts) -> Shadows | None:
    """Return the replicas that the residency policy keeps in the fast tier, if it keeps any."""
    bits = choices.fast.shadows
    if bits is None:
        return None
    if slots.are_apart:
        raise BadUsage(
            "replicas that stay are all on one GPU: leave out --devices, or choose another "
            "--residency"
        )
    wanted = [
        artefacts.replicas.widths[0] if width == NOTHING else width for width in bits.tolist()
    ]
    stores = open_replicas(choices.opened, artefacts.replicas, sorted({*wanted}))
    return Shadows(stores, bits, choices.opened.model.device)


def _open_tiers(choices: Choices, artefacts: Artefacts, undo: ExitStack) -> Tiers:
    """Open the slow tier, the link and the near tier."""
    replicas = open_replicas(choices.opened, artefacts.replicas, choices.policies.widths)
    split = choices.fast.split
    devices = choices.devices
    tiers = open_tiers(choices.opened, choices.link, replicas, split=split, devices=devices)
    undo.callback(tiers.link.close)
    return tiers


def _measured_window(choices: Choices, slots: Slots, tiers: Tiers) -> int:
    """Return the bytes that a step may prefetch, by a short measurement, or computed where a
    machine is emulated; 0 where nothing is prefetched."""
    if not choices.policies.brings_ahead or not len(slots):
        return 0
    if choices.settings.scaled_to:
        return scaled_window(choices.opened.shape, machine(choices.settings.scaled_to))
    bytes_per_s = _link_bytes_per_s(choices, slots, tiers)
    return prefetch_window(
        choices.opened, bytes_per_s, is_fused=choices.is_fused, dense=choices.dense
    )


def _link_bytes_per_s(choices: Choices, slots: Slots, tiers: Tiers) -> float:
    """Return the rate of an emulated link, or measure that of another."""
    return tiers.bandwidth or link_bytes_per_second(
        tiers.link,
        slots.alike(),
        choices.partitions.num_experts,
        num_devices=choices.partitions.count,
    )


def _measured_ratio(choices: Choices, slots: Slots, tiers: Tiers) -> float:
    """Return the bandwidth of the link over that of the near tier, each measured by a few experts
    unless it is emulated."""
    near = choices.link.near
    if near is None:
        opened = choices.opened
        resident = ResidentExperts(opened, slots, tiers.slow, None, is_fused=choices.is_fused)
        is_together = not choices.is_fused and not slots.are_apart
        backend = open_backend(
            opened,
            resident,
            choices.threads,
            batched=tiers.slow.together(opened) if is_together else None,
            is_fused=choices.is_fused,
        )
        near = near_bytes_per_second(opened, tiers.near, backend)
    return rounded_ratio(_link_bytes_per_s(choices, slots, tiers) / near)


def _build_controller(choices: Choices, artefacts: Artefacts, window: int) -> Controller:
    return build_controller(
        choices.policies,
        choices.opened.shape,
        num_slots=choices.fast.num_slots,
        shadows=choices.fast.shadows,
        split=choices.fast.split,
        scope=choices.scope,
        window=window,
        artefacts=artefacts,
        num_devices=choices.settings.devices,
    )


def _watch_routers(
    choices: Choices, artefacts: Artefacts, controller: Controller, undo: ExitStack
) -> Watcher:
    """Install the router hooks that the policies need, and no more."""
    opened = choices.opened
    policies = choices.policies
    watcher = Watcher(opened)
    prefetch = policies.prefetch
    undo.callback(watcher.stop)
    if prefetch.reads_predictions:
        watcher.see_predictions(prefetch.distance)
    if prefetch.reads_learned:
        ahead = min(prefetch.distance, opened.shape.num_layers)
        watcher.see_predictions(0, Predictor(artefacts.predictors, ahead, opened.model.device))
    if any(getattr(policies, axis).sees_probabilities for axis in POLICIES):
        watcher.see_probabilities()
    if controller.sees_embeddings:
        watcher.see_embeddings()
    return watcher


def _install(parts: Parts, undo: ExitStack) -> None:
    """Install the engine in the model, and the compiled modules beside the experts if they were
    asked for, and start the thread that matches expert maps."""
    parts.engine.install()
    undo.callback(parts.engine.uninstall)
    if parts.dense:
        undo.callback(parts.dense.uninstall)
        steps = parts.engine.steps
        parts.dense.install(steps if steps.can_skip_planning else None)
    if matching := parts.policies.matching:
        undo.callback(matching.close)
        matching.run_in_background()
        parts.watcher.on_opening = matching.begin
    if parts.controller.opens_passes:
        parts.watcher.on_opening = parts.engine.open_pass


def lay_out_slots(parts: Parts) -> Slots:
    """Make the controller, the slow tier and the engine follow `parts.fast`, a new split of the
    same budget. Returns the new slots, which are empty; the slots of `parts` are out of use. Raises
    OutOfResources."""
    shared = lay_out(parts.controller, parts.policies, parts.fast, parts.scope)
    parts.tiers.slow.segments.cut(parts.fast.split)
    parts.tiers.slow.cut()
    slots = Slots(shared, parts.devices)
    parts.engine.lay_out(slots)
    return slots


def cache_on_device(choices: Choices, controller: Controller) -> CacheOnDevice | None:
    """Return the host's record of a cache that the device decides on; None where the host decides,
    or nothing is left to decide. Raises BadUsage where the device is to decide and cannot."""
    if choices.settings.decide == HOST:
        return None
    if reason := _reason_not_on_device(choices, controller.cache.num_slots):
        raise BadUsage(f"--decide device {reason}")
    return None if controller.holds_all else CacheOnDevice(controller, choices.policies)


def _reason_not_on_device(choices: Choices, num_slots: int) -> str:
    """Return why the device cannot decide, and what to give; an empty text where it can."""
    opened = choices.opened
    device = opened.model.device
    shape = opened.shape
    kind = choices.link.kind
    if choices.fused is None or not choices.fused.needs_no_host:
        return (
            "needs a GPU with Triton and kernels for the experts, and there are none for "
            f"{opened.family} on {kind_of(device)} (docs/gpu.md): leave it out"
        )
    if kind == "disk" or not is_host(device) and kind != "cuda":
        return "has the GPU read experts from page-locked memory: give --link cuda"
    if num_slots < (least := shape.num_layers * shape.top_k):
        return f"needs room for all experts of a token in every layer: give --budget {least}x"
    if choices.policies.prefetch.distance and shape.num_layers == 1:
        return "prefetches for the next layer, and there is one only: leave out --prefetch"
    return ""


def whole_experts(choices: Choices, window: int) -> int:
    """Return the bytes that a step may prefetch. Where the device decides they are rounded down to
    whole experts, at least one, so that no transfer is under way from one step to the next. Raises
    BadUsage where the user asked for fewer."""
    nbytes = choices.opened.shape.expert_nbytes
    if choices.settings.decide == HOST or not choices.policies.prefetch.distance:
        return window
    if window < nbytes and choices.settings.window:
        raise BadUsage(f"--decide device prefetches whole experts: give --window {nbytes} or more")
    return max(window // nbytes, 1) * nbytes
