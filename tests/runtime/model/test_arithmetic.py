"""One expert and the sum over experts equal the model's own module, to the bit, for any selection
of experts."""

import numpy as np
import pytest
import torch
from torch import nn

from runtime.model.arithmetic import accumulate, assign, expert_forward, gather, weigh
from tests.helpers.families import FAMILIES

NONE = -1


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])  # gated; also biased and transposed
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_the_sum_over_experts_is_the_modules_own(family: str, num_tokens: int) -> None:
    experts = _experts(family)
    hidden, selected, weights = _step(num_tokens, num_experts=4)
    assert torch.equal(
        _ours(experts, hidden, selected, weights), experts(hidden, selected, weights)
    )


def test_an_expert_without_a_gate_or_with_a_norm() -> None:
    experts = _Plain()
    x = torch.arange(6.0).view(2, 3)
    weights = {name: parameter[1] for name, parameter in experts.named_parameters()}
    expected = (x @ weights["up_proj"].T).relu() @ weights["down_proj"].T
    assert torch.equal(expert_forward(experts, weights, x), expected)
    experts.has_post_expert_norm = True
    assert torch.equal(expert_forward(experts, weights, x), 2 * expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 6])
def test_tokens_are_grouped_by_expert_in_order_of_rank(num_tokens: int) -> None:
    selected = np.random.default_rng(num_tokens).permuted([[0, 3, 5, NONE]] * num_tokens, axis=1)
    expected: dict[int, list[tuple[int, int]]] = {}
    for rank in range(4):
        for token in range(num_tokens):
            expected.setdefault(int(selected[token, rank]), []).append((token, rank))
    del expected[NONE]
    assigned = assign(selected, torch.device("cpu"))
    assert assigned.keys() == expected.keys()
    for expert, (tokens, ranks) in assigned.items():
        pairs = (
            [(0, ranks)] if tokens is None else [*zip(tokens.tolist(), ranks.tolist(), strict=True)]
        )
        assert pairs == expected[expert]


def test_a_token_may_select_an_expert_twice() -> None:
    assigned = assign(np.array([[3, 1, 3]]), torch.device("cpu"))
    assert {
        expert: (found.tokens.tolist(), found.ranks.tolist()) for expert, found in assigned.items()
    } == {
        1: ([0], [1]),
        3: ([0, 0], [0, 2]),
    }


def test_a_share_has_the_dtype_of_the_sum() -> None:
    for num_tokens in (1, 2):
        [assigned] = assign(np.zeros((num_tokens, 1), np.int64), torch.device("cpu")).values()
        out = torch.full((num_tokens, 3), 0.5, dtype=torch.bfloat16)
        accumulate(out, torch.ones(num_tokens, 3), assigned)
        assert torch.equal(out, torch.full_like(out, 1.5))


class _Plain(nn.Module):
    """Two experts of 3 inputs and 4 neurons, without gate, bias or transposition."""

    has_gate = has_bias = is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.arange(-12.0, 12.0).view(2, 4, 3), requires_grad=False)
        self.down_proj = nn.Parameter(torch.arange(-8.0, 16.0).view(2, 3, 4), requires_grad=False)
        self.act_fn = nn.ReLU()

    def post_expert_norm(self, y: torch.Tensor) -> torch.Tensor:
        return 2 * y


def _experts(family: str) -> nn.Module:
    model = FAMILIES[family]()[1].requires_grad_(False)
    model.set_experts_implementation("eager")
    return model.model.layers[0].mlp.experts


def _step(num_tokens: int, *, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, selected = scores.topk(2)
    return torch.randn(num_tokens, 32, generator=generator), selected, weights


def _ours(
    experts: nn.Module, hidden: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for expert, assigned in sorted(assign(selected.numpy(), hidden.device).items()):
        parts = {name: parameter[expert] for name, parameter in experts.named_parameters()}
        accumulate(
            out,
            weigh(expert_forward(experts, parts, gather(hidden, assigned)), weights, assigned),
            assigned,
        )
    return out
