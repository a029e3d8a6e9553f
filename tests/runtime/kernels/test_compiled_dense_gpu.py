"""The Triton kernels for norms, routers and attention compile for GPUs, and read the cache 16 bytes
a thread."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.triton_process import compiled, compiler, needs_triton
from tests.runtime.kernels.test_compiled_gpu import CAPABILITIES, assert_counted_in_order, wide

pytestmark = [needs_triton, pytest.mark.slow]
TENSORS = (
    dict.fromkeys(("x_ptr", "added_ptr", "out_ptr", "query_ptr", "key_ptr", "value_ptr"), "*bf16")
    | dict.fromkeys(("keys_ptr", "values_ptr", "cos_ptr", "sin_ptr", "logits_ptr"), "*bf16")
    | dict.fromkeys(("query_weights_ptr", "key_weights_ptr", "shares_ptr", "sinks_ptr"), "*fp32")
    | dict.fromkeys(("eps", "query_eps", "key_eps", "scaling"), "fp32")
    | {"done_ptr": "*i32", "count_ptr": "*i64", "ids_ptr": "*i64", "mask_ptr": "*u8"}
)
NONE = {"query_weights_ptr": None, "key_weights_ptr": None, "cos_ptr": None, "sin_ptr": None}
ODD = (
    "eps", "query_eps", "key_eps", "scaling", "count", "is_rounded", "half", "is_paired", "is_each",
    "is_wide", "is_shared_out", "room", "angles", "top_k", "groups", "num_heads", "num_keys",
    "count_ptr",
)  # fmt: skip
Compile = Callable[..., str]


@pytest.fixture(params=CAPABILITIES)
def ptx(request: pytest.FixtureRequest, tmp_path: Path) -> Compile:
    """A function that compiles a kernel for one compute capability, anew."""

    def build(kernel: object, tensors: dict[str, str], **own: object) -> str:
        codes = compiled(kernel, request.param, tensors, odd=ODD, **own)
        assert codes["cubin"]
        return codes["ptx"]

    with compiler(tmp_path):
        yield build


def test_norms_compile_with_and_without_a_sum(ptx: Compile) -> None:
    from runtime.kernels.gpu.dense import norms

    tensors = TENSORS | {"weights_ptr": "*fp32"}
    assert wide(ptx(norms._normalise, tensors, rows=1, block=2048)) >= 2
    assert wide(ptx(norms._normalise, tensors, rows=8, block=128, added_ptr=None)) >= 1


def test_routers_compile_with_logits_of_either_kind(ptx: Compile) -> None:
    from runtime.kernels.gpu.dense import routing

    tensors = TENSORS | {"weights_ptr": "*bf16", "wide_ptr": "*fp32"}
    own = {"block": 128, "ranks": 8}
    assert ptx(routing._choose, tensors, rows=1, **own)
    assert ptx(routing._choose, tensors, rows=2, wide_ptr=None, **own)


def test_heads_are_prepared_with_norms_of_either_width_and_without(ptx: Compile) -> None:
    from runtime.kernels.gpu.dense import attention

    own = {"rows": 1, "block": 128, "value_block": 128}
    for is_late, span in ((False, 2048), (False, 128), (True, 128)):
        spans = {"query_block": span, "key_block": span}
        assert ptx(attention.prepare, TENSORS, is_late=is_late, **own, **spans)
    spans = {"query_block": 128, "key_block": 128}
    assert ptx(attention.prepare, TENSORS, is_late=False, **own, **spans, **NONE)


def test_the_cache_is_read_16_bytes_a_thread(ptx: Compile) -> None:
    from runtime.kernels.gpu.dense import attention

    own = {"positions": attention.POSITIONS, "block": 128, "value_block": 128, "shares": 16}
    code = ptx(attention.attend, TENSORS, sinks_ptr=None, **own)
    assert wide(code) >= 8, "4096 keys and as many values, by 128 threads"
    assert_counted_in_order(code)
    assert ptx(attention.attend, TENSORS | {"mask_ptr": "*bf16"}, **own)
    assert ptx(attention.attend, TENSORS, mask_ptr=None, sinks_ptr=None, **own | {"shares": 1})
