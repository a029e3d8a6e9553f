"""Which link a run takes: what the user named, or what the model and the machine suggest."""

from artifacts.errors import BadUsage
from artifacts.hardware.machines import machine
from runtime.control import sizes
from runtime.model.open import MoeModel
from runtime.session.probe import scaled_rates
from runtime.tiers.open import LinkChoice


def resolve_link(
    opened: MoeModel, *, link: str, near: str | None, scaled_to: str | None, is_fused: bool = False
) -> LinkChoice:
    """`auto` is cuda on a GPU and disk elsewhere. Raises BadUsage for what is not understood or not there."""
    on_cuda = opened.model.device.type == "cuda"
    if scaled_to:
        rates = scaled_rates(opened, machine(scaled_to), is_fused=is_fused)
        return LinkChoice("emulated", rates.link, 0.0, rates.near)
    near_rate = sizes.rate(near)[0] if near else None
    if link == "cuda" and not on_cuda:
        raise BadUsage("--link cuda needs the model on a CUDA device: use --link disk, or a rate such as 5GB/s")
    if link == "auto":
        link = "cuda" if on_cuda else "disk"
    if link in ("disk", "cuda"):
        return LinkChoice(link, near=near_rate)
    if link == "direct":
        return LinkChoice("disk", near=near_rate, is_direct=True)
    return LinkChoice("emulated", *sizes.rate(link), near_rate)


def link_name(opened: MoeModel, link: str) -> str:
    """How a hardware profile calls what `--link` says: `pinned` for a GPU's own, `disk` with the page cache or past it,
    or the rate as given.

    Raises BadUsage for what is not understood or not there.
    """
    kind = resolve_link(opened, link=link, near=None, scaled_to=None).kind
    return {"cuda": "pinned", "disk": "disk", "emulated": link}[kind]
