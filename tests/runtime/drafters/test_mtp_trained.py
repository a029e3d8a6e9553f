"""A model and its further layer that were trained for seconds on words in random order: most drafts
are accepted, though each answer is drawn."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers.utils import logging

from runtime.model.open import open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.helpers.families import character_tokenizer
from tests.helpers.further import FURTHER, Reference

pytestmark = pytest.mark.slow

WORDS = ("cache ", "draft ", "expert ", "layer ", "router ", "token ")
_STEPS = 200


def _batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield token ids [8, 48] of words in random order."""
    random = torch.Generator().manual_seed(seed)
    tokenizer = character_tokenizer()
    while True:
        orders = torch.randint(len(WORDS), (8, 12), generator=random).tolist()
        texts = ("".join(WORDS[word] for word in order) for order in orders)
        yield torch.tensor([tokenizer(text)["input_ids"][:48] for text in texts])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.disable_progress_bar()
    reference = Reference(FURTHER["glm4_moe"])
    for side in reference.sides:
        side.requires_grad_()
    parameters = [*reference.model.parameters(), *reference.donor.parameters(), *reference.sides]
    optimiser = torch.optim.AdamW(parameters, lr=4e-3)
    head = reference.model.get_output_embeddings()
    for _, ids in zip(range(_STEPS), _batches(0), strict=False):
        out = reference.model(input_ids=ids[:, :-2], output_hidden_states=True)
        further, _ = reference.layer(ids[:, 1:-1], out.hidden_states[-1])
        pairs = ((out.logits, ids[:, 1:-1]), (head(further), ids[:, 2:]))
        loss = sum(F.cross_entropy(given.flatten(0, 1), next_.flatten()) for given, next_ in pairs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for side in reference.sides:
        side.requires_grad_(False)
    return reference.save(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_most_drafts_are_accepted(trained: Path, temperature: float) -> None:
    prompt = next(_batches(1))[:1]
    answers = []
    for draft in ("none", "mtp:3"):
        settings = Settings(budget="50%", threads=1, draft=draft)
        with Session(open_model(str(trained)), settings) as session:
            sampling = Sampling(max_new_tokens=120, temperature=temperature, ignore_eos=True)
            answers.append([one.token_id for one in session.tokens(prompt, sampling)])
            told = session.verifier.receipt() if session.verifier else {}
    assert answers[0] == answers[1]
    assert told["accepted"] > 0.6 * told["drafted"]
    assert told["drafted"] > 60
