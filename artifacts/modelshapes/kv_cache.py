"""The widths at which keys and values are kept on request, and the bytes that they take. Imports
no torch.

The numbers of a token and head lie in groups, each with a scale and a least number in float16, as
in KIVI (Liu et al. 2024, arXiv:2402.02750), but of one token in place of many: what is kept of a
token depends on that token alone, however its prompt is cut.
"""

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage

AUTO = "auto"
KV_BITS: dict[str, int | None] = {AUTO: None, "int8": 8, "int4": 4}
"""The names of `--kv-cache-dtype`, and their bits; None: as the model computes."""

GROUP = 64  # numbers
_GROUP_NBYTES = 4  # of a scale and a least number


def kv_bits(name: str) -> int | None:
    """Return the bits of a number that is kept, None if it is kept as it is. Raises BadUsage for an
    unknown name."""
    if name not in KV_BITS:
        raise BadUsage(unknown("type of keys and values", name, KV_BITS))
    return KV_BITS[name]


def group_of(width: int) -> int:
    """Return the numbers of a group where a head has `width`: the most up to 64 that divide it."""
    return next(size for size in range(min(GROUP, width), 0, -1) if width % size == 0)


def kept_nbytes(width: int, bits: int) -> int:
    """Return the bytes that `width` numbers of one head take."""
    return width * bits // 8 + width // group_of(width) * _GROUP_NBYTES


def kept_share(bits: int | None, dtype_nbytes: float) -> float:
    """Return the bytes of keys and values over those of their dtype, in whole groups."""
    return 1.0 if bits is None else kept_nbytes(GROUP, bits) / (GROUP * dtype_nbytes)
