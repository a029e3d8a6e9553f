"""The price of few bits equals that of the plain model with the dequantised weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from artifacts.errors import BadInput, Incompatible
from artifacts.quantisation.widths import SCALAR_WIDTHS
from artifacts.shape import FULL_BITS
from profilers.compare import quality
from profilers.compare.quality import read
from runtime.control.counters import altered, is_exact
from runtime.model.open import MoeModel
from runtime.policies import parse
from runtime.policies.base import Artefacts
from runtime.policies.presets import presets
from runtime.session.session import Session, Settings
from tests.helpers.families import VOCABULARY
from tests.runtime.session.test_session import plain_model
from tools.gpu.checks.made_replicas import made, put
from tools.lab.price_precision import (
    AVERAGES,
    BitAssignment,
    Precision,
    assignments,
    check_widths,
)

SEQUENCES = [
    np.random.default_rng(at).integers(3, VOCABULARY, length)
    for at, length in enumerate((14, 9, 14))
]
KINDS = ["mixed", "prefix", "random", "random"]


@pytest.fixture(scope="module")
def artefacts(opened: MoeModel, tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return Artefacts(replicas=made(opened, tmp_path_factory.mktemp("replicas")))


@pytest.fixture(scope="module")
def wanted(artefacts: Artefacts) -> list[BitAssignment]:
    return assignments(artefacts.replicas, draws=2, seed=3)


@pytest.fixture(scope="module")
def pricing(opened: MoeModel, artefacts: Artefacts) -> Precision:
    return Precision(opened, artefacts, SEQUENCES, batch=2)


def widths(opened: MoeModel, artefacts: Artefacts, assignment: BitAssignment) -> np.ndarray:
    """Bits [L * E]."""
    policy = parse("residency", assignment.residency)
    policy.prepare(opened.shape, artefacts)
    return policy.share(assignment.budget_nbytes).shadows


def said(plain: PreTrainedModel) -> torch.Tensor:
    """Log-probabilities [N, V] of every token but the first of each sequence, in the order of
    `SEQUENCES`."""
    with torch.inference_mode():
        return torch.cat(
            [
                plain(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].double().log_softmax(-1)
                for ids in SEQUENCES
            ]
        )


@pytest.mark.parametrize("preset", ["shadow", "uniform-bits", "on-demand", "near", "horizon"])
def test_replicas_are_never_exact_and_a_lossless_preset_always_is(
    preset: str, opened: MoeModel, artefacts: Artefacts
) -> None:
    """Of a random model too, whose output hardly moves: what was altered is counted, no divergence
    is asked."""
    with Session(opened, Settings(preset=preset, budget="25%"), artefacts=artefacts) as session:
        read(session, SEQUENCES, prefill=4)
        assert (
            is_exact(altered(session.controller.counters.totals())) == presets()[preset].is_lossless
        )


def test_uniform_first_and_then_every_average_at_the_same_bytes(
    opened: MoeModel, artefacts: Artefacts, wanted: list[BitAssignment]
) -> None:
    assert [(one.name, one.avg_bits) for one in wanted] == [
        ("uniform", bits) for bits in reversed(SCALAR_WIDTHS)
    ] + [(kind, average) for average in AVERAGES for kind in KINDS]
    for start in range(len(SCALAR_WIDTHS), len(wanted), len(KINDS)):
        mixed, prefix, *random = (
            widths(opened, artefacts, one) for one in wanted[start : start + len(KINDS)]
        )
        assert prefix.mean() == wanted[start].avg_bits
        spent = [
            sum(artefacts.replicas.nbytes[bits] for bits in each.tolist())
            for each in (mixed, prefix, *random)
        ]
        budgets = {one.budget_nbytes for one in wanted[start : start + len(KINDS)]}
        assert budgets == {spent[1]} and max(spent) == spent[1]
        assert (
            all(sorted(each) == sorted(mixed) for each in random)
            and random[0].tolist() != random[1].tolist()
        )


@pytest.mark.parametrize("at", [2, -4, -1], ids=["uniform", "mixed", "random"])
def test_against_the_plain_model(
    at: int,
    folder: Path,
    opened: MoeModel,
    artefacts: Artefacts,
    wanted: list[BitAssignment],
    pricing: Precision,
) -> None:
    plain = plain_model(folder)
    assignment = wanted[at]
    full = said(plain)
    put(plain, opened, artefacts.replicas, widths(opened, artefacts, assignment))
    low = said(plain)
    targets = torch.from_numpy(np.concatenate([ids[1:] for ids in SEQUENCES]))[:, None]
    price = pricing.price(assignment)
    assert pricing.perplexity == pytest.approx(
        float((-full.gather(1, targets).mean()).exp()), rel=1e-5
    )
    by_hand = float((full - low).gather(1, targets).mean().exp())
    assert price.perplexity_ratio == pytest.approx(by_hand, rel=1e-4) and abs(by_hand - 1) > 1e-3
    assert price.kl == pytest.approx(float((full.exp() * (full - low)).sum(-1).mean()), rel=1e-2)
    assert price.loss_error > 0
    assert price.top1_agreement == pytest.approx(
        float((full.argmax(-1) == low.argmax(-1)).float().mean())
    )
    spent = sum(
        artefacts.replicas.nbytes[bits] for bits in widths(opened, artefacts, assignment).tolist()
    )
    assert price.nbytes == spent <= assignment.budget_nbytes


def test_token_by_token_is_the_same(
    opened: MoeModel, artefacts: Artefacts, wanted: list[BitAssignment], pricing: Precision
) -> None:
    def decoded(settings: Settings) -> quality.TextReading:
        with Session(opened, settings, artefacts=artefacts) as session:
            return quality.read(session, SEQUENCES, prefill=1)

    by_token = quality.compare(decoded(wanted[3].settings), decoded(Settings("full")))
    price = pricing.price(wanted[3])
    assert price.perplexity_ratio == pytest.approx(by_token.perplexity_ratio, rel=1e-4)
    assert price.kl == pytest.approx(by_token.kl, rel=1e-2)


def test_padding_is_not_counted(
    opened: MoeModel, artefacts: Artefacts, wanted: list[BitAssignment], pricing: Precision
) -> None:
    alone = Precision(opened, artefacts, SEQUENCES, batch=1)
    assert alone.perplexity == pytest.approx(pricing.perplexity, rel=1e-5)
    assert alone.price(wanted[3]).kl == pytest.approx(pricing.price(wanted[3]).kl, rel=1e-3)


def test_what_cannot_be_priced(opened: MoeModel, artefacts: Artefacts) -> None:
    with pytest.raises(
        Incompatible, match="needs replicas, which the store does not hold: run `moectl quantize`"
    ):
        check_widths(Artefacts())
    check_widths(artefacts)
    nbytes = {bits: artefacts.replicas.nbytes[bits] for bits in (2, 4, FULL_BITS)}
    with pytest.raises(
        Incompatible, match="inspect precision needs replicas of 1 bits; there are 2, 4, 16"
    ):
        check_widths(Artefacts(replicas=replace(artefacts.replicas, nbytes=nbytes)))
    with pytest.raises(BadInput, match="token"):
        Precision(opened, artefacts, [np.array([0, VOCABULARY])])
