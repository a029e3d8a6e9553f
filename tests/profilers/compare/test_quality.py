"""Quality equals that of an independent computation on the plain model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from profilers.compare.quality import TextReading, compare, expected_error, losses_by_text, read
from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings
from tests.helpers.families import VOCABULARY

PREFILL = 4
SEQUENCES = [
    np.random.default_rng(length).integers(3, VOCABULARY, length) for length in (14, 9, 14)
]


def reading(opened: MoeModel, settings: Settings) -> TextReading:
    with Session(opened, settings) as session:
        return read(session, SEQUENCES, prefill=PREFILL)


@pytest.fixture(scope="module")
def full(opened: MoeModel) -> TextReading:
    return reading(opened, Settings(preset="full"))


def test_the_full_model_is_as_good_as_itself(opened: MoeModel, full: TextReading) -> None:
    again = compare(reading(opened, Settings(preset="full")), full)
    assert (again.perplexity_ratio, again.kl, again.top1_agreement) == (1, 0, 1)


@pytest.mark.parametrize("settings", [{"budget": "2x"}, {"preset": "near"}, {"preset": "specmd"}])
def test_lossless_is_as_good(settings: dict[str, str], opened: MoeModel, full: TextReading) -> None:
    quality = compare(reading(opened, Settings(**settings)), full)
    assert (quality.perplexity_ratio, quality.kl, quality.top1_agreement) == (1, 0, 1)


def test_against_the_plain_model(folder: Path, opened: MoeModel, full: TextReading) -> None:
    """The plain model reads whole sequences at once; the session decodes token by token."""
    dropping = reading(opened, Settings(budget="25%", policies={"miss": "drop"}))
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    nll = []
    for sequence in SEQUENCES:
        with torch.inference_mode():
            logits = plain(input_ids=torch.from_numpy(sequence)[None]).logits[0].double()
        nll += [
            float(logits[at - 1].logsumexp(0) - logits[at - 1, sequence[at]])
            for at in range(PREFILL, len(sequence))
        ]
    assert len(full.targets) == len(nll) == len(full.decode_s) and len(full.prefill_s) == len(
        SEQUENCES
    )
    assert full.nll == pytest.approx(np.mean(nll), rel=1e-5)
    quality = compare(dropping, full)
    assert quality.perplexity_ratio == pytest.approx(np.exp(dropping.nll - np.mean(nll)), rel=1e-4)
    assert abs(quality.perplexity_ratio - 1) > 1e-3
    p, q = (each.logits.double().softmax(-1) for each in (full, dropping))
    assert quality.kl == pytest.approx(float((p * (p.log() - q.log())).sum(-1).mean()), rel=1e-3)
    assert quality.kl > 1e-3
    same = [
        int(a.argmax() == b.argmax()) for a, b in zip(full.logits, dropping.logits, strict=True)
    ]
    assert quality.top1_agreement == pytest.approx(np.mean(same))
    assert 0 < quality.top1_agreement < 1


def test_errors_are_paired_by_token() -> None:
    """Against many texts drawn from the same distribution: the error is the spread of their
    ratios."""
    rng = torch.Generator().manual_seed(0)
    ratios = []
    errors = []
    for _ in range(200):
        full = torch.randn(64, 9, generator=rng)
        mine = full + 0.1 * torch.randn(64, 9, generator=rng)
        targets = torch.randint(9, (64,), generator=rng)
        found = compare(*(TextReading(logits, targets, (), (), ()) for logits in (mine, full)))
        ratios.append(found.perplexity_ratio)
        errors.append(found.loss_error)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.15)
    assert expected_error(found.perplexity_ratio, found.kl, 64) == pytest.approx(
        found.loss_error, rel=0.5
    )
    assert (
        compare(*(TextReading(full[:1], targets[:1], (), (), ()) for _ in range(2))).loss_error == 0
    )


def test_progress_counts_decoded_tokens(opened: MoeModel) -> None:
    heard: list[int] = []
    with Session(opened, Settings(preset="full")) as session:
        read(session, SEQUENCES, prefill=PREFILL, progress=heard.append)
    assert heard == list(range(1, 1 + sum(len(sequence) - PREFILL for sequence in SEQUENCES)))


def test_losses_by_text_are_those_of_each_by_itself() -> None:
    torch.manual_seed(0)
    targets = torch.randint(7, (6,))
    mine, full = (TextReading(torch.randn(6, 7), targets, (), (), ()) for _ in range(2))
    kl, loss = losses_by_text(mine, full, num_texts=2)
    for number, part in enumerate((slice(0, 3), slice(3, 6))):
        one, other = (
            TextReading(each.logits[part], targets[part], (), (), ()) for each in (mine, full)
        )
        alone = compare(one, other)
        assert kl[number] == pytest.approx(alone.kl, rel=1e-5)
        assert np.exp(loss[number]) == pytest.approx(alone.perplexity_ratio, rel=1e-5)
