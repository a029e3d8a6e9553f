"""Plans that keep every expert resident: all of them in trellis codes of about a bit, and whole
experts beside them as far as there is room."""

from dataclasses import dataclass
from math import ceil

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.quantisation.replicas import in_memory
from artifacts.quantisation.widths import TRELLIS_WIDTHS, Width

WIDEST = 1.5
"""Bits up to which a plan tries."""


@dataclass(frozen=True, slots=True)
class Shadowed:
    """Every expert at `bits` bits in `nbytes`, and `share` of the experts whole beside them, in the
    checkpoint's own format. `tokens_per_s`, where bandwidths are known: nothing is waited for, and
    experts are wanted equally often."""

    bits: Width
    nbytes: int
    share: float
    tokens_per_s: float | None


def shadowed(
    model: ModelShape, room_nbytes: int, chosen: Machine | None, *, dense: int | None
) -> list[Shadowed]:
    """Return a row for each width at which every expert fits into `room_nbytes`, by rising bits; no
    rows where all experts fit whole."""
    shape = model.shape
    rows = []
    if room_nbytes >= shape.nbytes:
        return rows
    for bits in (bits for bits in TRELLIS_WIDTHS if bits <= WIDEST):
        replica = replica_nbytes(model, bits)
        left = room_nbytes - replica * shape.num_keys
        if left < 0 or replica >= shape.expert_nbytes:
            break
        share = min(1.0, left // shape.expert_nbytes / shape.num_keys)
        speed = chosen and _speed(
            model, Costs.of(model, chosen).with_dense(dense), share, replica / shape.expert_nbytes
        )
        rows.append(Shadowed(bits, replica * shape.num_keys, share, speed))
    return rows


def replica_nbytes(model: ModelShape, bits: Width) -> int:
    """Bytes of one expert's replica, all tensors counted."""
    return in_memory(ceil(model.shape.expert_nbytes / model.weight_nbytes * bits / 8))


def _speed(model: ModelShape, costs: Costs, share: float, of_bytes: float) -> float:
    shape = model.shape
    expert_s = share * costs.expert.seconds(1) + (1 - share) * costs.expert.seconds(
        1, share=of_bytes
    )
    return 1 / (
        costs.head.seconds(1) + shape.num_layers * (costs.rest.seconds(1) + shape.top_k * expert_s)
    )
