"""GPTQ checkpoints as gptqmodel and similar tools read them: the tensors of a module and the
config."""

from collections.abc import Mapping

import torch

from artifacts.errors import BadInput
from artifacts.quantisation.packing import Packed
from artifacts.quantisation.widths import listed

WIDTHS = (2, 3, 4, 8)  # no public reader supports 1 bit
MULTIPLE = 32  # of inputs and outputs: kernels process as many at a time
V2 = "gptq_v2"


def gptq_tensors(packed: Packed) -> dict[str, torch.Tensor]:
    """`qweight`, `qzeros`, `scales` and `g_idx` of one module. Raises BadInput where no reader
    supports it."""
    if packed.bits not in WIDTHS:
        raise BadInput(
            f"GPTQ checkpoints have {listed(WIDTHS, last=' or ')} bits, not {packed.bits}"
        )
    if packed.num_inputs % MULTIPLE or packed.num_outputs % MULTIPLE:
        size = f"{packed.num_outputs} outputs and {packed.num_inputs} inputs"
        raise BadInput(
            f"GPTQ checkpoints need multiples of {MULTIPLE} inputs and outputs, this projection "
            f"has {size}"
        )
    groups = torch.arange(packed.num_inputs, dtype=torch.int32) // packed.group_size
    return {
        "qweight": packed.qweight,
        "qzeros": packed.qzeros,
        "scales": packed.scales,
        "g_idx": groups,
    }


def quantize_config(
    bits: int,
    group_size: int,
    *,
    damp: float,
    dynamic: Mapping[str, Mapping],
    meta: Mapping[str, object],
) -> dict[str, object]:
    """The content of `quantize_config.json`; `dynamic` has modules of other group sizes (`+:`) or
    left alone (`-:`)."""
    return {
        "bits": bits,
        "group_size": group_size,
        "damp_percent": damp,
        "desc_act": False,
        "sym": False,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": V2,
        "format": V2,
        "pack_dtype": "int32",
        "dynamic": dict(dynamic),
        "meta": dict(meta),
    }
