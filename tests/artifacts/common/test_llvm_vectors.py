"""The features that kernels ask for are those that LLVM may use."""

import pytest

from artifacts.common.llvm_vectors import features_of
from tests.helpers.processors import as_processor


@pytest.mark.parametrize(
    ("written", "features"),
    [
        ("", set()),
        ("+avx2,-f16c", {"avx2"}),
        ("-avx512f,+avx512f", {"avx512f"}),
        ("+avx2,+avx512bf16,+avx512bw,+avx512f,+avx512vbmi,-avx512bw", {"avx2", "avx512f"}),
        ("+avx,+avx2,+avx512bf16,+avx512f,+f16c,+sse2,-avx", {"sse2"}),
    ],
)
def test_what_needs_a_feature_that_is_taken_away_goes_with_it(
    written: str, features: set[str]
) -> None:
    assert features_of(written) == features


@pytest.mark.parametrize(("name", "wide"), [("haswell", 0), ("cascadelake", 6)])
def test_a_processor_taken_for_another_has_no_more_than_that(name: str, wide: int) -> None:
    found = features_of(as_processor({"NUMBA_CPU_NAME": name})["NUMBA_CPU_FEATURES"])
    assert len([feature for feature in found if feature.startswith("avx512")]) <= wide
    assert not as_processor(
        {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}
    ) and not as_processor({})
