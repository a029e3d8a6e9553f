"""Choice of the side that decides which experts a decoded token evicts: the host, or the device
that computes the token's experts."""

from artifacts.errors import BadUsage
from runtime.control.controller import Controller
from runtime.control.on_device import CacheOnDevice
from runtime.session.parts import Choices
from runtime.session.settings import HOST


def cache_on_device(choices: Choices, controller: Controller) -> CacheOnDevice | None:
    """Return the host's record of a cache that the device decides on; None where the host decides,
    or nothing is left to decide. Raises BadUsage where the device is to decide and cannot."""
    if choices.settings.decide == HOST:
        return None
    device = choices.opened.model.device.type
    shape = choices.opened.shape
    kind = choices.link.kind
    if choices.fused is None or not choices.fused.needs_no_host:
        raise BadUsage(
            "--decide device needs a GPU with Triton and kernels for the experts, and there are "
            f"none for {choices.opened.family} on {device} (docs/gpu.md): leave it out"
        )
    if kind == "disk" or device == "cuda" and kind != "cuda":
        raise BadUsage(
            "--decide device has the GPU read experts from page-locked memory: give --link cuda"
        )
    if min(pool.num_slots for pool in controller.cache.pools) < shape.top_k:
        least = shape.num_layers * shape.top_k
        raise BadUsage(
            "--decide device needs room for all experts of a token in every layer: give --budget "
            f"{least}x"
        )
    if choices.policies.prefetch.distance and shape.num_layers == 1:
        raise BadUsage(
            "--decide device prefetches for the next layer, and there is one only: leave out "
            "--prefetch"
        )
    return None if controller.holds_all else CacheOnDevice(controller, choices.policies)


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
