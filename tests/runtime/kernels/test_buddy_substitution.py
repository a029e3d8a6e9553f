"""The kernel that substitutes buddies says what the policy says, by triton's interpreter on a CPU; and it compiles."""

from pathlib import Path

from tests.helpers.triton_process import compiler, cubin_size, interpret, needs_triton

pytestmark = needs_triton
INTERPRETED = """
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from runtime.kernels.gpu.buddy_substitution import substitute
from runtime.policies.miss import buddy

@st.composite
def cases(draw):
    num_experts, num_tokens, num_buddies = draw(st.integers(1, 12)), draw(st.integers(0, 4)), draw(st.integers(1, 6))
    top_k, share = draw(st.integers(1, min(5, num_experts))), draw(st.sampled_from((0.0, 0.3, 0.6, 1.0)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    selected = np.array([random.permutation(num_experts)[:top_k] for _ in range(num_tokens)], np.int64)
    buddies = np.full((num_experts, num_buddies), -1)
    for expert in range(num_experts):
        peers = random.permutation(np.delete(np.arange(num_experts), expert))[: random.integers(num_buddies + 1)]
        buddies[expert, : len(peers)] = peers
    resident = random.random(num_experts) < share
    return selected.reshape(num_tokens, top_k), resident, buddies, draw(st.integers(0, num_buddies + 1))

replaced = 0

@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def check(case):
    global replaced
    selected, resident, buddies, max_rank = case
    before = selected.copy()
    expected = buddy.substitute(selected, resident, buddies, max_rank)
    said = substitute(*map(torch.from_numpy, (selected, resident, buddies)), max_rank)
    assert np.array_equal(said.numpy(), expected), (case, said)
    assert np.array_equal(selected, before)
    replaced += int((expected != selected).sum())

check()
print(replaced)
"""


def test_it_says_what_the_policy_says() -> None:
    (replaced,) = interpret(INTERPRETED)
    assert int(replaced) > 20, "too few examples in which anything was replaced"


def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    from runtime.kernels.gpu.buddy_substitution import _substitute

    tensors = {"selected_ptr": "*i64", "resident_ptr": "*u8", "buddies_ptr": "*i64", "out_ptr": "*i64"}
    with compiler(tmp_path):
        assert cubin_size(_substitute, 90, tensors, width=8, most=16)
