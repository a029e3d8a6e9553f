"""Checks of products with packed weights: every width against the reference, and its speed."""

import statistics

import torch
from torch.nn import functional as F

from artifacts.quantisation.packing import Packed, packed_shapes
from tools.gpu.timing import microseconds

ALLOWED = 5e-3  # relative to the product with the same weights in float32
SHAPES = (
    (1024, 2048, 128),
    (2048, 1024, 128),
    (130, 512, 64),
    (64, 96, 32),
    (50, 24, 24),
)  # out, in, group
COUNTS = (
    1,
    2,
    7,
    11,
    12,
    64,
)  # tokens, below and above the number from which on a matrix is unpacked
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEASURED = (1024, 2048)
MEASURED_COUNTS = (1, 4, 11)
COLD_NBYTES = 256 << 20  # bytes of weights in rotation, more than a GPU's cache holds


def random_packed(
    num_outputs: int,
    num_inputs: int,
    bits: int,
    group_size: int | None = None,
    *,
    device: str = "cpu",
    seed: int = 0,
) -> Packed:
    """A matrix of random codes, quickly made, with zero-points from the lowest to the highest."""
    if group_size is None:
        group_size = next((size for size in (128, 64, 32) if num_inputs % size == 0), num_inputs)
    random = torch.Generator(device).manual_seed(seed)
    parts = {}
    for name, (dtype, shape) in packed_shapes(num_outputs, num_inputs, bits, group_size).items():
        if name == "scales":
            parts[name] = (
                torch.rand(shape, generator=random, device=device).add(0.1).mul(0.01).to(dtype)
            )
        else:
            parts[name] = torch.randint(
                -(2**31), 2**31, shape, generator=random, dtype=dtype, device=device
            )
    return Packed(
        bits, group_size, num_inputs, parts["qweight"], parts["scales"], parts.get("qzeros")
    )


def copied(packed: Packed) -> Packed:
    """A copy at another place in memory."""
    zeros = None if packed.qzeros is None else packed.qzeros.clone()
    return Packed(
        packed.bits,
        packed.group_size,
        packed.num_inputs,
        packed.qweight.clone(),
        packed.scales.clone(),
        zeros,
    )


def agreement(device: str, bits: int) -> tuple[bool, str, dict]:
    """The largest relative difference to the reference over shapes, dtypes and numbers of tokens,
    and the kernel."""
    from runtime.kernels.low_bit import dequantise, kernel_name, linear

    worst = {}
    for num_outputs, num_inputs, group_size in SHAPES:
        packed = random_packed(num_outputs, num_inputs, bits, group_size, device=device)
        weights = dequantise(packed)
        for dtype in DTYPES:
            for count in COUNTS:
                x = torch.randn(count, num_inputs, device=device).to(dtype)
                exact = (x.double() @ weights.double().mT).float()
                difference = ((linear(x, packed).float() - exact).norm() / exact.norm()).item()
                name = (
                    f"{num_outputs}x{num_inputs}, {str(dtype).removeprefix('torch.')}, {count} "
                    "tokens"
                )
                worst[name] = difference
    case = max(worst, key=worst.__getitem__)
    kernel = kernel_name(torch.device(device))
    detail = f"{kernel}: largest relative difference {worst[case]:.1e} ({case})"
    return worst[case] <= ALLOWED, detail, {"relative": worst, "allowed": ALLOWED, "kernel": kernel}


def speed(
    device: str, bits: int, *, nbytes: int | None = None, turns: int = 5
) -> tuple[bool, str, dict]:
    """Microseconds of a product with cold weights, beside the same in bfloat16; `gbps` is of the
    packed bytes."""
    from runtime.kernels.low_bit import dequantise, linear

    packed = random_packed(*MEASURED, bits, device=device)
    plain = dequantise(packed, torch.bfloat16).contiguous()
    ours = [copied(packed) for _ in range(max(2, (nbytes or COLD_NBYTES) // packed.nbytes))]
    theirs = [plain.clone() for _ in range(max(2, (nbytes or COLD_NBYTES) // plain.nbytes))]
    figures = {"nbytes": packed.nbytes}
    told = []
    for count in MEASURED_COUNTS:
        x = torch.randn(count, MEASURED[1], device=device, dtype=torch.bfloat16)
        pairs = [
            (_seconds(linear, x, ours, device), _seconds(F.linear, x, theirs, device))
            for _ in range(turns)
        ]
        own_s, plain_s = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(own / other for own, other in pairs)
        gbps = packed.nbytes / own_s / 1e9
        figures[f"{count} tokens"] = {
            "us": own_s * 1e6,
            "bfloat16_us": plain_s * 1e6,
            "ratio": ratio,
            "gbps": gbps,
        }
        told.append(f"{count} tokens {own_s * 1e6:.0f} us, {ratio:.2f} of bfloat16")
    return True, "; ".join(told), figures


def _seconds(multiply, x: torch.Tensor, weights: list, device: str, *, calls: int = 200) -> float:
    """Seconds of one product with the next weights each time, by the device's clock where there is
    one."""
    return microseconds(lambda turn: multiply(x, weights[turn]), len(weights), calls, device) / 1e6
