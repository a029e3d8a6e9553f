"""What a session does otherwise than it was asked, in words: nothing falls back in silence."""

from typing import TYPE_CHECKING

from runtime.control.resplit import NOT_ANEW, tokens_between
from runtime.session.settings import FUSED
from runtime.tiers.open import LinkChoice

if TYPE_CHECKING:
    from runtime.session.session import Session


def fallbacks(session: "Session", choice: LinkChoice) -> list[str]:
    """A line each, for the receipt; the policies' own come first."""
    opened, settings, fast = session.opened, session.settings, session.fast
    found, num_devices = list(session.policies.fallbacks), settings.devices
    if settings.experts == FUSED and not session.is_fused:
        where = f"{num_devices} devices" if num_devices > 1 else opened.model.device.type
        found.append(f"experts of {opened.family} on {where} are not fused: torch computes")
    if num_devices > 1 and len(set(session.devices)) == 1:
        found.append(f"devices: {num_devices} parts of {session.devices[0]} in the place of GPUs")
    if num_devices > 1 and tokens_between(None, fast.split, session.policies):
        found.append(NOT_ANEW)
    if fast.split and choice.kind == "disk":
        found.append("link disk reads more than a segment for each: use a link from RAM")
    if fast.holds(opened.shape):
        found.append(f"budget {session.budget} holds the whole model: every expert stays resident")
    return found
