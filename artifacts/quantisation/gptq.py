"""GPTQ (Frantar et al. 2023): matrices at 1 to 8 bits that keep their products with calibration
inputs.

There are two recipes. `plain` is the published algorithm: inputs in their order, the grid of a
group from the range of its weights, at 1 bit the sign times the mean size. `refined` costs no
storage and adds three steps. Grids are chosen by the cost of their errors. Groups, and inputs
within them, are visited by falling activation (without an index in the file). The scales of each
row are refitted to its codes in the metric of the Hessian.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from artifacts.errors import BadInput, BadUsage
from artifacts.quantisation.gptq_solver import (
    ColumnLoop,
    Metric,
    Solution,
    activation_order,
    plain_order,
    refit,
)
from artifacts.quantisation.grids import SIGN_ZERO, divisor, nearest, plain_grid, tie, top_code
from artifacts.quantisation.packing import Packed, pack, unpack
from artifacts.quantisation.widths import SCALAR_WIDTHS, listed

RECIPES = ("plain", "refined")
VERSION = 2  # of the recipes: replicas of another version are not resumed
GROUP_SIZES = (128, 64, 32)
# Matrices with more inputs are solved in single precision: matrix products take most of their time.
_DOUBLE_INPUTS = 1024
# Rows of all widths together in one run of the column loop, and numbers that its refit holds: both
# limit the memory.
_CHUNK_ROWS = 2048
_REFIT_SIZE = 2**25
# Narrow enough to multiply little of the other half, wide enough for the products to be fast.
_GRAM_STRIP = 256
# Matrices of at most so many weights are compared with plain rounding row by row: few rows can come
# out worse than it.
_FEW_WEIGHTS = 4096


@dataclass(frozen=True, slots=True)
class Quantized:
    """One matrix: codes uint8 [out, in]; scales float16 and zeros uint8 [out, groups]; no zeros at
    1 bit.

    A weight is `scale * (code - zero)`, where the zero of 1 bit is 1/2.
    """

    bits: int
    group_size: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def dequantised(self) -> torch.Tensor:
        """The weights, float32 [out, in]."""
        zeros = SIGN_ZERO if self.zeros is None else self.zeros.float()[:, :, None]
        levels = self.codes.float().unflatten(1, (-1, self.group_size)) - zeros
        return (levels * self.scales.float()[:, :, None]).flatten(1)

    def packed(self) -> Packed:
        """The matrix as streams of words, in main memory."""
        words = torch.from_numpy(pack(self.codes.T.cpu().numpy(), self.bits))
        scales = self.scales.T.cpu().contiguous()
        zeros = self.zeros
        if zeros is not None:
            zeros = torch.from_numpy(pack(zeros.cpu().numpy(), self.bits)).T.contiguous()
        return Packed(self.bits, self.group_size, self.codes.shape[1], words, scales, zeros)

    @classmethod
    def from_packed(cls, packed: Packed) -> "Quantized":
        """Unpack the codes."""
        bits = packed.bits
        codes = torch.from_numpy(unpack(packed.qweight.cpu().numpy(), bits, packed.num_inputs)).T
        zeros = None
        if packed.qzeros is not None:
            zeros = torch.from_numpy(
                unpack(packed.qzeros.cpu().numpy().T, bits, packed.num_outputs)
            )
        return cls(bits, packed.group_size, codes, packed.scales.cpu().T, zeros)


def hessian(inputs: torch.Tensor) -> torch.Tensor:
    """`2/n X^T X` [in, in] of inputs X [n, in], in single precision or better."""
    inputs = inputs if inputs.dtype == torch.float64 else inputs.float()
    return gram(inputs).mul_(2 / max(1, len(inputs)))


def gram(inputs: torch.Tensor) -> torch.Tensor:
    """`X^T X` [in, in] of inputs X [n, in]; computes little more than one half, as the result is
    symmetric."""
    size = inputs.shape[1]
    result = inputs.new_empty(size, size)
    for start in range(0, size, _GRAM_STRIP):
        end = start + _GRAM_STRIP
        strip = inputs[:, start:end].T @ inputs[:, start:]
        result[start:end, start:] = strip
        result[start:, start:end] = strip.T
    return result


def group_size_for(num_inputs: int, wanted: int = 128) -> int:
    """The largest of `wanted`, 64 and 32 that divides the inputs and does not exceed `wanted`; else
    the whole row."""
    sizes = [size for size in (wanted, *GROUP_SIZES) if size <= wanted and num_inputs % size == 0]
    return sizes[0] if sizes else num_inputs


def quantize(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: Sequence[int],
    group_size: int,
    *,
    damp: float = 0.01,
    recipe: str = "refined",
) -> dict[int, Quantized]:
    """Quantise one matrix [out, in] at each of `bits`, from the Hessian [in, in] of its inputs,
    which is factorised once.

    Runs on the device of the weight and the Hessian; `packed` brings the result to main memory.
    Rows are independent: stack matrices that share their inputs. Raises BadInput where the Hessian
    has no factor, in double precision and with up to a hundred times the damping, and for weights
    that are not finite or too large for 16-bit scales; BadUsage for unknown widths, recipes and
    group sizes.
    """
    _check(weight, hessian, bits, group_size, damp, recipe)
    widths = sorted(bits)
    is_dead = hessian.diagonal() == 0
    weight = weight.detach()
    if recipe == "plain":
        # The published code zeroes dead inputs; `refined` rounds them on their own, as later text
        # may use them.
        weight = weight.masked_fill(is_dead, 0)
    elif not is_dead.all():
        is_dead = torch.zeros_like(is_dead)
    metric = _metric(hessian, is_dead, group_size, damp, recipe)
    ordered = weight.T.to(metric.root.dtype)[metric.order].contiguous()
    chunks = _chunks(ordered, len(widths), group_size)
    parts = [_solve(metric, rows, widths, group_size, recipe) for rows in chunks]
    replicas = {
        width: _joined([part[widths.index(width)] for part in parts], torch.cat) for width in bits
    }
    if recipe == "refined" and weight.numel() <= _FEW_WEIGHTS:
        replicas = {
            width: _best_rows(weight, hessian, replica) for width, replica in replicas.items()
        }
    return replicas


def quantize_weight(
    weight: torch.Tensor, inputs: torch.Tensor, bits: int, group_size: int, damp: float = 0.01
) -> torch.Tensor:
    """The weight [out, in] as its replica at `bits` holds it, calibrated on inputs [n, in];
    float32, recipe `refined`."""
    return quantize(weight, hessian(inputs), [bits], group_size, damp=damp)[bits].dequantised()


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> Quantized:
    """Round each weight [out, in] to the nearest level of its group's plain grid, without
    calibration."""
    check_widths([bits])
    check_group_size(group_size, weight.shape[1])
    groups = weight.detach().float().unflatten(1, (-1, group_size)).permute(1, 2, 0)
    grids = zip(*(plain_grid(group[:, None], [bits]) for group in groups), strict=True)
    scales, zeros = (torch.cat(part) for part in grids)
    low = -zeros[:, None]
    levels = nearest(groups, divisor(scales)[:, None], low, top_code(bits) + low, tie(bits))
    return _quantized(bits, levels.flatten(0, 1), scales, zeros)


def check_widths(bits: Sequence[int]) -> None:
    """Raise BadUsage unless all widths are known and distinct."""
    if not bits or len(set(bits)) < len(bits) or not set(bits) <= set(SCALAR_WIDTHS):
        raise BadUsage(
            f"bits {listed(bits) or 'missing'}: choose one or more of {listed()}, each once"
        )


def check_group_size(group_size: int, num_inputs: int) -> None:
    """Raise BadUsage unless the group size divides the inputs."""
    if group_size < 1 or num_inputs % group_size:
        raise BadUsage(
            f"groups of {group_size} do not divide {num_inputs} inputs: "
            f"{group_size_for(num_inputs)} would do"
        )


def _check(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: Sequence[int],
    group_size: int,
    damp: float,
    recipe: str,
) -> None:
    check_widths(bits)
    check_group_size(group_size, weight.shape[1])
    if recipe not in RECIPES:
        raise BadUsage(f"no recipe '{recipe}': choose {' or '.join(RECIPES)}")
    if not damp > 0:
        raise BadUsage(f"damping {damp}: give a share above 0, for example 0.01")
    if hessian.shape != (weight.shape[1], weight.shape[1]):
        raise BadUsage(f"a Hessian of {list(hessian.shape)} for a weight of {list(weight.shape)}")
    if not (weight.isfinite().all() and hessian.isfinite().all()):
        raise BadInput(
            "weights or calibration inputs hold values that are not finite: the checkpoint is "
            "damaged"
        )


def _metric(
    hessian: torch.Tensor, is_dead: torch.Tensor, group_size: int, damp: float, recipe: str
) -> Metric:
    """The metric, with inputs in the recipe's order. `is_dead` marks inputs that were never active
    and need a price all the same."""
    order = plain_order(hessian.diagonal())
    if recipe == "refined":
        order = activation_order(hessian.diagonal(), group_size)
    price = is_dead.to(hessian.dtype)
    mean = (hessian.diagonal() + price).mean()
    for damping in (damp, 10 * damp, 100 * damp):
        for dtype in _precisions(len(hessian)):
            metric = Metric.of(hessian, order, ridge=price + damping * mean, dtype=dtype)
            if metric:
                return metric
    raise BadInput(
        "the Hessian of the calibration inputs has no Cholesky factor, even damped: give more "
        "samples"
    )


def _precisions(num_inputs: int) -> tuple[torch.dtype, ...]:
    return (torch.float64,) if num_inputs <= _DOUBLE_INPUTS else (torch.float32, torch.float64)


def _chunks(weights: torch.Tensor, num_widths: int, group_size: int) -> Iterator[torch.Tensor]:
    """Split the rows of weights [in, rows] so that a run fits the memory; a refit holds its groups
    squared."""
    num_groups = len(weights) // group_size
    size = max(1, min(_CHUNK_ROWS, _REFIT_SIZE // num_groups**2) // num_widths)
    return (part.contiguous() for part in weights.split(size, dim=1))


def _solve(
    metric: Metric, weights: torch.Tensor, bits: Sequence[int], group_size: int, recipe: str
) -> list[Quantized]:
    """Quantise weights [in, rows], in the metric's order, at each width; the results are in the
    order of storage."""
    is_refined = recipe == "refined"
    solution = ColumnLoop(metric, weights, bits, group_size=group_size, is_refined=is_refined).run()
    scales = (
        refit(metric, weights, metric.hessian @ weights, solution)
        if is_refined
        else solution.scales
    )
    return _stored(Solution(solution.levels, scales, solution.zeros), metric.order, bits)


def _stored(solution: Solution, order: torch.Tensor, bits: Sequence[int]) -> list[Quantized]:
    inputs = order.argsort()
    group_size = len(order) // len(solution.scales)
    groups = inputs.view(-1, group_size)[:, 0] // group_size
    return [
        _quantized(
            width,
            solution.levels[:, index][inputs],
            solution.scales[groups, index],
            solution.zeros[groups, index],
        )
        for index, width in enumerate(bits)
    ]


def _quantized(
    bits: int, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> Quantized:
    """Build a matrix from levels [in, rows] and grids [groups, rows]."""
    stored = scales.half()
    if stored.isinf().any():
        raise BadInput(f"weights of {scales.max():.3g} and more are too large for 16-bit scales")
    group_size = len(levels) // len(scales)
    codes = levels.unflatten(0, (-1, group_size)) + zeros[:, None]
    return Quantized(
        bits,
        group_size,
        codes.flatten(0, 1).round_().to(torch.uint8).T,
        stored.T,
        zeros.to(torch.uint8).T if bits > 1 else None,
    )


def _best_rows(weight: torch.Tensor, hessian: torch.Tensor, replica: Quantized) -> Quantized:
    """Take the replica's rows, or the rows of plain rounding where these cost less."""
    rounded = round_to_nearest(weight, replica.bits, replica.group_size)
    errors = [weight.double() - version.dequantised() for version in (replica, rounded)]
    price, price_rounded = ((error @ hessian.double() * error).sum(1) for error in errors)
    is_kept = (price <= price_rounded)[:, None]
    return _joined([replica, rounded], lambda pair: torch.where(is_kept, *pair))


def _joined(
    parts: Sequence[Quantized], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Quantized:
    """Join the codes, the scales and the zero-points of several matrices."""
    names = ("codes", "scales") if parts[0].zeros is None else ("codes", "scales", "zeros")
    return replace(
        parts[0], **{name: join([getattr(part, name) for part in parts]) for name in names}
    )
