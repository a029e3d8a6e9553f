"""The link and the near tier that the options of a run stand for."""

from artifacts.errors import BadUsage
from artifacts.hardware.machines import machine
from runtime.control import sizes
from runtime.links.choose import default_kind
from runtime.model.open import MoeModel
from runtime.session.probe import scaled_rates
from runtime.tiers.open import LinkChoice


def resolve_link(
    opened: MoeModel, *, link: str, near: str | None, scaled_to: str | None, is_fused: bool = False
) -> LinkChoice:
    """Resolve `--link`, `--near` and `--scaled-to`. `auto` is `cuda` for a model on a GPU, else
    `disk`. To scale to a machine, the compute of one expert is measured first, by fused kernels if
    `is_fused`.

    Raises BadUsage for a link, a rate or a machine that is not understood, and for `cuda` without a
    GPU.
    """
    if scaled_to:
        rates = scaled_rates(opened, machine(scaled_to), is_fused=is_fused)
        return LinkChoice("emulated", rates.link, 0.0, rates.near)
    near_rate = sizes.rate(near)[0] if near else None
    default = default_kind(opened.model.device)
    if link == "cuda" and default != "cuda":
        raise BadUsage(
            "--link cuda needs the model on a CUDA device: use --link disk, or a rate such as 5GB/s"
        )
    if link == "auto":
        link = default
    if link in ("disk", "cuda"):
        return LinkChoice(link, near=near_rate)
    if link == "direct":
        return LinkChoice("disk", near=near_rate, is_direct=True)
    return LinkChoice("emulated", *sizes.rate(link), near_rate)


def link_name(opened: MoeModel, link: str) -> str:
    """The name that hardware profiles give the link of a `--link` option: `pinned` for CUDA copies,
    `disk` with the page cache or past it, or the rate as given. Raises BadUsage as `resolve_link`
    does."""
    kind = resolve_link(opened, link=link, near=None, scaled_to=None).kind
    return {"cuda": "pinned", "disk": "disk", "emulated": link}[kind]
