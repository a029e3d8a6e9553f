"""The price of substitution equals that of the plain model with its routing altered by hand."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.errors import BadUsage
from runtime.model.open import MoeModel, open_model
from runtime.policies import parse
from runtime.policies.base import Artefacts, Miss
from runtime.policies.miss.buddy import substitute
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY
from tools.lab.price_substitution import (
    Substitution,
    SubstitutionLimits,
    buddy_policy,
    random_residents,
)

SEQUENCES = [
    np.random.default_rng(at).integers(3, VOCABULARY, length)
    for at, length in enumerate((14, 9, 14))
]
OPEN = SubstitutionLimits("none")


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> str:
    return str(checkpoint("olmoe"))


@pytest.fixture(scope="module")
def opened(folder: str) -> MoeModel:
    return open_model(folder)


@pytest.fixture(scope="module")
def pricing(opened: MoeModel) -> Substitution:
    entropy = np.tile(np.linspace(0, 1, 101), (opened.shape.num_layers, 1))
    return Substitution(opened, SEQUENCES, entropy, batch=2)


@pytest.fixture(scope="module")
def buddies(opened: MoeModel) -> np.ndarray:
    """Random lists [L, E, 4]."""
    random = np.random.default_rng(0)
    num_experts = opened.shape.num_experts
    peers = [
        [e for e in random.permutation(num_experts) if e != pivot][:4]
        for pivot in range(num_experts)
    ]
    return np.tile(peers, (opened.shape.num_layers, 1, 1))


def residents(opened: MoeModel, share: float = 0.5) -> np.ndarray:
    return random_residents(opened.shape, share, seed=1)


def policies(opened: MoeModel, buddies: np.ndarray) -> dict[str, Miss]:
    q = np.broadcast_to(np.linspace(1, 0.5, buddies.shape[2]), buddies.shape)
    made = {
        name: parse("miss", name) for name in ("zero", "random_resident", "best_resident", "fetch")
    }
    for policy in made.values():
        policy.prepare(opened.shape, Artefacts())
    return made | {"buddy": buddy_policy(Artefacts(buddies=buddies, buddy_q=q), opened.shape)}


def perplexity(
    folder: str, opened: MoeModel, alter: Callable[[int, torch.Tensor, torch.Tensor], tuple]
) -> float:
    """The plain model, with the experts of each layer called on ids and weights that `alter`
    returns."""
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    for layer in opened.layers:
        experts = plain.get_submodule(layer.name)
        experts.register_forward_pre_hook(
            lambda module, args, at=layer.index: (args[0], *alter(at, *args[1:]))
        )
    nll = []
    for sequence in SEQUENCES:
        with torch.inference_mode():
            logits = plain(input_ids=torch.from_numpy(sequence)[None]).logits[0].double()
        nll += [
            float(logits[at - 1].logsumexp(0) - logits[at - 1, sequence[at]])
            for at in range(1, len(sequence))
        ]
    return math.exp(np.mean(nll))


def test_the_full_model_is_the_plain_one(
    pricing: Substitution, opened: MoeModel, folder: str
) -> None:
    assert pricing.perplexity == pytest.approx(
        perplexity(folder, opened, lambda _, *args: args), rel=1e-5
    )


def test_nothing_absent_or_nothing_replaced_costs_nothing(
    pricing: Substitution, opened: MoeModel, buddies: np.ndarray
) -> None:
    everything = residents(opened, 1.0)
    for policy in policies(opened, buddies).values():
        price = pricing.price(policy, OPEN, everything)
        assert (price.absent, price.replaced, price.ratio, price.loss_error) == (0, 0, 1, 0)
    fetched = pricing.price(policies(opened, buddies)["fetch"], OPEN, residents(opened))
    assert fetched.absent > 0.2 and (fetched.replaced, fetched.ratio) == (0, 1)


def test_dropping_is_a_weight_of_zero(
    pricing: Substitution, opened: MoeModel, folder: str, buddies: np.ndarray
) -> None:
    resident = torch.from_numpy(residents(opened))
    price = pricing.price(policies(opened, buddies)["zero"], OPEN, resident.numpy())
    by_hand = perplexity(
        folder, opened, lambda layer, ids, weights: (ids, weights * resident[layer][ids])
    )
    assert price.ratio == pytest.approx(by_hand / pricing.perplexity, rel=1e-5)
    assert abs(price.ratio - 1) > 1e-3 and price.replaced == price.absent > 0


def test_buddies_take_the_place_and_the_weight(
    pricing: Substitution, opened: MoeModel, folder: str, buddies: np.ndarray
) -> None:
    resident = residents(opened)

    def altered(
        layer: int, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(
            substitute(ids.numpy(), resident[layer], buddies[layer], 4)
        ), weights

    price = pricing.price(policies(opened, buddies)["buddy"], OPEN, resident)
    assert price.ratio == pytest.approx(
        perplexity(folder, opened, altered) / pricing.perplexity, rel=1e-5
    )
    assert abs(price.ratio - 1) > 1e-3 and 0 < price.replaced <= price.absent
    assert 0 < price.loss_error < 1


@pytest.mark.parametrize("name", ["zero", "random_resident", "best_resident", "buddy"])
def test_limits_bind_every_policy_alike(
    name: str, pricing: Substitution, opened: MoeModel, buddies: np.ndarray
) -> None:
    """With top-2, beta 0.5 excludes a token with one absent expert; 0.6 includes it."""
    policy = policies(opened, buddies)[name]
    resident = residents(opened)

    def replaced(**limits: float) -> float:
        return pricing.price(policy, replace(OPEN, **limits), resident).replaced

    open_ = replaced()
    assert 0 < replaced(rho=1) < open_
    assert (
        replaced(rho=0)
        == replaced(beta=0.5)
        == replaced(margin=0.0)
        == replaced(percentile=100)
        == 0
    )
    assert 0 < replaced(beta=0.6) < open_
    assert 0 < replaced(percentile=95) < open_
    assert replaced(rho=2) == pytest.approx(open_, rel=0.2)


def test_padding_is_not_counted(
    pricing: Substitution, opened: MoeModel, buddies: np.ndarray
) -> None:
    """A batch of two sequences of unequal length gives the same as each sequence alone."""
    policy = policies(opened, buddies)["buddy"]
    resident = residents(opened)
    entropy = np.zeros((opened.shape.num_layers, 101))
    alone = Substitution(opened, SEQUENCES, entropy, batch=1).price(policy, OPEN, resident)
    together = pricing.price(policy, OPEN, resident)
    assert (together.absent, together.replaced) == (alone.absent, alone.replaced)
    assert together.ratio == pytest.approx(alone.ratio, rel=1e-4)


def test_residents_are_drawn_evenly(opened: MoeModel) -> None:
    drawn = random_residents(opened.shape, 0.375, seed=3)
    assert (drawn.sum(axis=1) == 3).all()
    assert np.array_equal(drawn, random_residents(opened.shape, 0.375, seed=3))
    assert not np.array_equal(drawn, random_residents(opened.shape, 0.375, seed=4))
    with pytest.raises(BadUsage, match="leaves 0 of 8"):
        random_residents(opened.shape, 0.01, seed=0)
