"""Every format against its published formula, written out number by number, and the compiled loops
against the formula in torch."""

import math
from collections.abc import Callable

import pytest
import torch

from artifacts.formats.base import Format, are_sound
from artifacts.formats.fp8 import Scaled
from artifacts.formats.integers.awq import Awq
from artifacts.formats.integers.gptq import Gptq
from artifacts.formats.integers.packed_integers import PackedIntegers
from artifacts.formats.numbers import filler, numbers, turn
from artifacts.formats.nvfp4 import NvFp4
from artifacts.formats.stated import stated_quantisation
from artifacts.quantisation.gptq import Quantized
from artifacts.quantisation.gptq_checkpoint import gptq_tensors
from tests.helpers.published import CONFIGS, MAKERS

ROWS = 64
COLUMNS = 96
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def format_of(method: str) -> Format:
    return stated_quantisation({"quantization_config": dict(CONFIGS[method])}).spellings[0].format


def drawn(method: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return MAKERS[method](ROWS, COLUMNS, torch.Generator().manual_seed(seed))


def code(words: torch.Tensor, index: int, bits: int) -> int:
    """Code number `index` of a little-endian stream of 32-bit words, bit by bit."""
    stream = range(index * bits, (index + 1) * bits)
    return sum(
        (int(words[bit // 32]) >> (bit % 32) & 1) << place for place, bit in enumerate(stream)
    )


def float4(code: int) -> float:
    return (-1 if code & 8 else 1) * E2M1[code & 7]


def float8(byte: int) -> float:
    """An e4m3 number from its bits."""
    sign = -1 if byte & 0x80 else 1
    exponent = byte >> 3 & 15
    mantissa = byte & 7
    return sign * (
        math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    )


def at_fp8(tensors: dict[str, torch.Tensor], o: int, k: int) -> float:
    return float8(int(tensors["weight"].view(torch.uint8)[o, k])) * float(
        tensors["scale"][o // 16, k // 16]
    )


def at_mxfp4(tensors: dict[str, torch.Tensor], o: int, k: int) -> float:
    byte = int(tensors["blocks"][o, k // 32, k % 32 // 2])
    return math.ldexp(float4(byte >> 4 * (k % 2) & 15), int(tensors["scales"][o, k // 32]) - 127)


def at_nvfp4(tensors: dict[str, torch.Tensor], o: int, k: int) -> float:
    scale = torch.tensor(float(tensors["scale"][o, k // 16])) * tensors["global"]
    return float4(int(tensors["packed"][o, k // 2]) >> 4 * (k % 2) & 15) * float(scale)


def at_packed(tensors: dict[str, torch.Tensor], o: int, k: int) -> float:
    return (code(tensors["packed"][o], k, 4) - 8) * float(tensors["scale"][o, k // 32])


def at_gptq(tensors: dict[str, torch.Tensor], o: int, k: int) -> float:
    zero = code(tensors["qzeros"][k // 32], o, 4) + 1 & 15
    return (code(tensors["qweight"][:, o], k, 4) - zero) * float(tensors["scales"][k // 32, o])


def at_awq(tensors: dict[str, torch.Tensor], o: int, k: int) -> float:
    place = [0, 4, 1, 5, 2, 6, 3, 7][o % 8]
    words = tensors["qweight"][k, o // 8], tensors["qzeros"][k // 32, o // 8]
    q, z = (int(word) >> 4 * place & 15 for word in words)
    return (q - z) * float(tensors["scales"][k // 32, o])


FORMULAS = {
    "fp8": at_fp8,
    "mxfp4": at_mxfp4,
    "nvfp4": at_nvfp4,
    "compressed-tensors": at_packed,
    "gptq": at_gptq,
    "awq": at_awq,
}


@pytest.mark.parametrize("method", FORMULAS)
def test_numbers_are_those_of_the_published_formula(method: str) -> None:
    tensors = drawn(method)
    matrix = format_of(method).dequantise(tensors)
    assert matrix.shape == (ROWS, COLUMNS)
    for o in range(0, ROWS, 5):
        for k in range(0, COLUMNS, 7):
            assert float(matrix[o, k]) == pytest.approx(
                FORMULAS[method](tensors, o, k), rel=1e-6
            ), (o, k)


VARIANTS = {
    **{
        method: (format_of(method), lambda method=method: drawn(method, seed=1))
        for method in MAKERS
    },
    "fp8 of blocks that are cut off": (
        Scaled(block=(40, 50)),
        lambda: drawn("fp8") | {"scale": torch.rand(2, 2)},
    ),
    "fp8 with a scale for each row": (
        Scaled(),
        lambda: drawn("fp8") | {"scale": torch.rand(ROWS, 1)},
    ),
    "fp8 with one scale": (Scaled(), lambda: drawn("fp8") | {"scale": torch.tensor(0.3)}),
    "fp8 with the scales of blocks as modelopt shapes them": (
        Scaled(block=(40, 50)),
        lambda: drawn("fp8") | {"scale": torch.rand(2, 1, 2, 1)},
    ),
    "integers of 8 bits": (
        Scaled(),
        lambda: {
            "weight": torch.randint(-128, 128, (ROWS, COLUMNS)).to(torch.int8),
            "scale": torch.rand(ROWS)[:, None],
        },
    ),
    "packed integers of 8 bits": (
        PackedIntegers(bits=8),
        lambda: {
            "packed": torch.randint(-(2**31), 2**31, (ROWS, COLUMNS // 4)).int(),
            "scale": torch.rand(ROWS, 3),
            "zero_point": torch.randint(-(2**31), 2**31, (ROWS // 4, 3)).int(),
        },
    ),
    "packed integers in the order of activations": (
        PackedIntegers(),
        lambda: drawn("compressed-tensors") | {"g_idx": torch.randint(0, 3, (COLUMNS,)).int()},
    ),
    "gptq in the order of activations": (
        Gptq(is_permuted=True),
        lambda: drawn("gptq") | {"g_idx": torch.randint(0, 3, (COLUMNS,)).int()},
    ),
    "nvfp4 with an inverse scale": (NvFp4(is_inverse=True), lambda: drawn("nvfp4")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_loops_give_the_bits_of_the_formula(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    form, make = VARIANTS[variant]
    tensors = make()
    assert torch.equal(numbers(form, tensors, dtype), form.dequantise(tensors).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", MAKERS)
def test_tiles_of_rows_are_those_of_the_formula(method: str, dtype: torch.dtype) -> None:
    """Of a matrix that no block of a loop has whole; the last tile is smaller."""
    form = format_of(method)
    tensors = MAKERS[method](2208, 160, torch.Generator().manual_seed(2))
    fill = filler(form, tensors, dtype)
    exact = form.dequantise(tensors).to(dtype)
    for rows in (slice(0, 2112), slice(2112, 2208)):
        tile = torch.empty(len(exact[rows]), 160, dtype=dtype)
        fill(rows.start, tile)
        assert torch.equal(tile, exact[rows])


@pytest.mark.parametrize("shape", [(64, 160), (13, 21)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_a_matrix_is_turned_into_columns_of_another(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = torch.randn(shape, dtype=dtype)
    out = torch.zeros(shape[1], 3 * shape[0], dtype=dtype)
    turn(matrix, out[:, shape[0] : 2 * shape[0]])
    before, own, behind = out.chunk(3, dim=1)
    assert torch.equal(own, matrix.T) and not before.any() and not behind.any()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_reads_what_moectl_exports(bits: int) -> None:
    """A second witness: the writer of checkpoints is tested against GPTQModel's files."""
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS)).to(torch.uint8)
    zeros = torch.randint(0, 2**bits, (ROWS, COLUMNS // 32)).to(torch.uint8)
    quantised = Quantized(bits, 32, codes, torch.rand(ROWS, COLUMNS // 32).half(), zeros)
    tensors = gptq_tensors(quantised.packed())
    assert torch.equal(Gptq(bits=bits, zero_offset=0).dequantise(tensors), quantised.dequantised())
    assert torch.equal(
        numbers(Gptq(bits=bits, zero_offset=0), tensors, torch.float32), quantised.dequantised()
    )


FAULTS = [
    ("fp8", "weight", lambda tensor: tensor.view(torch.uint8)[3].fill_(0x7F), "NaN or infinity"),
    ("fp8", "scale", lambda tensor: tensor[1].fill_(1e38), "a scale for weights of up to 4e+40"),
    ("fp8", "scale", lambda tensor: tensor[1].fill_(-0.1), "a negative scale"),
    ("fp8", "scale", lambda tensor: tensor[1].fill_(0), "a scale of 0 for weights that are not 0"),
    ("fp8", "scale", lambda tensor: tensor.fill_(0), "scales that are all 0"),
    ("mxfp4", "scales", lambda tensor: tensor[3].fill_(255), "NaN or infinity"),
    ("mxfp4", "scales", lambda tensor: tensor[3].fill_(254), "a scale for weights of up to 1e+39"),
    ("nvfp4", "scale", lambda tensor: tensor.view(torch.uint8)[3].fill_(0xFF), "NaN or infinity"),
    ("nvfp4", "scale", lambda tensor: tensor.view(torch.uint8)[3].fill_(0x84), "a negative scale"),
    ("nvfp4", "scale", lambda tensor: tensor.fill_(0), "scales that are all 0"),
    ("nvfp4", "global", lambda tensor: tensor.fill_(0), "a scale of the matrix of 0"),
    ("nvfp4", "global", lambda tensor: tensor.fill_(-1), "a scale of the matrix of -1"),
    ("nvfp4", "global", lambda tensor: tensor.fill_(1e38), "a scale for weights of up to"),
    ("compressed-tensors", "scale", lambda tensor: tensor[3].fill_(torch.nan), "NaN or infinity"),
    (
        "compressed-tensors",
        "scale",
        lambda tensor: tensor[3].fill_(1e38),
        "a scale for weights of up to",
    ),
    (
        "compressed-tensors",
        "size",
        lambda tensor: tensor.copy_(torch.tensor([ROWS, -COLUMNS])),
        "a matrix [64, 96] wh",
    ),
    (
        "compressed-tensors",
        "size",
        lambda tensor: tensor.fill_(2**62),
        "a matrix [64, 96] whose weight_shape says [46",
    ),
    ("gptq", "scales", lambda tensor: tensor[1].fill_(torch.inf), "NaN or infinity"),
    ("gptq", "scales", lambda tensor: tensor[1].fill_(65504), "a scale for weights of up to 1e+06"),
    ("gptq", "scales", lambda tensor: tensor.fill_(0), "scales that are all 0"),
    ("awq", "scales", lambda tensor: tensor[1].fill_(torch.nan), "NaN or infinity"),
    ("awq", "scales", lambda tensor: tensor[1].fill_(-65504), "a scale for weights of up to 1e+06"),
]


@pytest.mark.parametrize(("method", "role", "spoil", "fault"), FAULTS)
def test_numbers_that_no_model_has_are_seen(
    method: str, role: str, spoil: Callable, fault: str
) -> None:
    form = format_of(method)
    tensors = drawn(method)
    assert form.fault(tensors) is None
    spoil(tensors[role])
    assert form.fault(tensors).startswith(fault)


def test_a_block_of_zeros_may_have_a_scale_of_0_and_integers_a_negative_one() -> None:
    fp8 = drawn("fp8")
    gptq = drawn("gptq")
    fp8["scale"][1, 2] = 0
    fp8["weight"].view(torch.uint8)[16:32, 32:48] &= 0x80
    gptq["scales"][1] *= -1  # as AutoRound writes them
    assert format_of("fp8").fault(fp8) is format_of("gptq").fault(gptq) is None


def word(code: int, bits: int) -> int:
    return sum(code << place for place in range(0, 32, bits)) - (1 << 32) * (code >> bits - 1)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_symmetric_gptq_are_in_the_middle_by_either_version(bits: int) -> None:
    form = Gptq(bits=bits, is_symmetric=True)
    tensors = MAKERS["gptq"](ROWS, COLUMNS, torch.Generator().manual_seed(0), bits=bits)
    middle = 1 << bits - 1
    found = []
    for stored in (middle - 1, middle):
        tensors["qzeros"].fill_(word(stored, bits))
        settled = form.settled(tensors["qzeros"])
        assert settled.fault(tensors) is None
        assert settled.row_of_zeros(ROWS) == bytes(tensors["qzeros"][0].numpy())
        found.append(settled.dequantise(tensors))
    assert torch.equal(*found) and form.settled(tensors["qzeros"]).zero_offset == 0
    assert form.fault(tensors).startswith(f"zero-points other than {middle}, and config.json says")
    tensors["qzeros"][1, 0] ^= 1
    assert form.settled(tensors["qzeros"]).fault(tensors).startswith("zero-points other than")


def test_zero_points_that_a_config_denies_are_seen() -> None:
    awq = Awq(is_symmetric=True)
    tensors = drawn("awq")
    assert awq.fault(tensors).startswith(
        "zero-points other than 8, and config.json says zero_point false"
    )
    tensors["qzeros"].fill_(word(8, 4))
    assert awq.fault(tensors) is None
    form = PackedIntegers(is_symmetric=True)
    tensors = drawn("compressed-tensors")
    tensors["zero_point"] = torch.full((ROWS // 8, 3), word(8, 4), dtype=torch.int32)
    assert form.fault(tensors) is None
    tensors["zero_point"][2, 1] ^= 1
    assert form.fault(tensors).startswith("zero-points, and config.json says that it is symmetric")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str
)
def test_every_code_of_eight_bits_is_sound_where_it_is_finite(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert [
        are_sound([codes[[0, 129, code]]]) for code in range(256)
    ] == codes.float().isfinite().tolist()
