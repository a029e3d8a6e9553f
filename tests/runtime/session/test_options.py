"""Options of a request that change its logits, by their formulas; alone, in turns and in a batch of
eight."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from artifacts.errors import BadInput
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.grammar.grammars import Grammar
from runtime.session.generation.logprobs import Logprobs
from runtime.session.generation.round_robin import RoundRobin
from runtime.session.generation.sampling import Sampling
from runtime.session.generation.stream import Token
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint

PROMPT = torch.tensor([[5, 9, 2, 14]])
SCHEMA = Grammar.of_schema(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer"}},
        "required": ["kind", "age"],
        "additionalProperties": False,
    }
)
EIGHT = (
    Sampling(12),
    Sampling(12, grammar=SCHEMA, num_logprobs=2),
    Sampling(12, presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(12, temperature=1.0, min_p=0.2, seed=3),
    Sampling(12, logit_bias=((7, 100.0),), frequency_penalty=2.0),
    Sampling(12, temperature=1.0, seed=4, grammar=SCHEMA),
    Sampling(12, grammar=Grammar("regex", "(ab|ba){2,9}")),
    Sampling(12, num_logprobs=5),
)


@pytest.fixture(scope="module")
def session(checkpoint: Checkpoint) -> Iterator[Session]:
    opened: MoeModel = open_model(str(checkpoint("olmoe")))
    with Session(opened, Settings(budget="100%", threads=1, preset="on-demand")) as session:
        yield session


def generated(session: Session, sampling: Sampling) -> list[Token]:
    return list(session.tokens(PROMPT, sampling))


def ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def logits(session: Session, answer: list[int]) -> torch.Tensor:
    """Those after the prompt and each token of an answer but its last [N, V]."""
    whole = torch.cat([PROMPT, torch.tensor([answer])], dim=1)
    return session.forward(whole).logits[0, PROMPT.shape[1] - 1 : -1].clone()


@pytest.mark.parametrize("kind", [RequestBatch, RoundRobin])
def test_a_batch_of_eight_gets_what_each_gets_alone(session: Session, kind: type) -> None:
    alone = [generated(session, sampling) for sampling in EIGHT]
    with kind(session, rows=8) as batch:
        numbers = [batch.add(PROMPT, sampling) for sampling in EIGHT]
        results = []
        while not batch.is_idle:
            results += batch.step()
    for number, tokens in zip(numbers, alone, strict=True):
        mine = [result for result in results if result.request == number and not result.error]
        own = [(result.token_id, result.logprobs) for result in mine if result.token_id is not None]
        assert [token for token, _ in own] == ids(tokens)
        for (_, mine), token in zip(own, tokens, strict=True):
            theirs = token.logprobs
            assert (mine is None) == (theirs is None)
            if mine:
                assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4)
                assert [one for one, _ in mine.top] == [one for one, _ in theirs.top]
    assert len({tuple(ids(tokens)) for tokens in alone}) == len(EIGHT) - 1  # first and last agree


def test_penalties_follow_openais_formula(session: Session) -> None:
    for given in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.25}, {"presence_penalty": -1}):
        answer = ids(generated(session, Sampling(12, ignore_eos=True, **given)))
        for place, row in enumerate(logits(session, answer)):
            row[2] = -torch.inf  # the end, which is ignored
            for token, count in Counter(answer[:place]).items():
                row[token] -= given.get("frequency_penalty", 0) * count
                row[token] -= given.get("presence_penalty", 0)
            assert answer[place] == row.argmax()


def test_a_bias_decides(session: Session) -> None:
    assert ids(generated(session, Sampling(4, logit_bias=((7, 100.0),)))) == [7] * 4
    first = ids(generated(session, Sampling(1)))[0]
    assert ids(generated(session, Sampling(1, logit_bias=((first, -100.0),)))) != [first]
    with pytest.raises(BadInput, match="logit_bias has token 96, the vocabulary 0 to 95"):
        generated(session, Sampling(1, logit_bias=((96, 1.0),)))


def test_min_p_leaves_the_probable_tokens(session: Session) -> None:
    drawn = Sampling(30, temperature=1.0, top_k=0, seed=5, ignore_eos=True)
    free = ids(generated(session, drawn))
    kept = ids(generated(session, Sampling(30, **_fields(drawn), min_p=0.7)))
    shares = logits(session, kept).softmax(dim=-1)
    shares[:, 2] = 0
    least = 0.7 * shares.max(dim=-1).values
    assert (shares[torch.arange(30), kept] >= least * 0.999).all() and kept != free


def _fields(sampling: Sampling) -> dict[str, object]:
    return {
        name: getattr(sampling, name) for name in ("temperature", "top_k", "seed", "ignore_eos")
    }


def test_log_probabilities_are_the_models_own(session: Session) -> None:
    """Neither temperature nor a grammar changes them."""
    sampling = Sampling(9, temperature=1.7, seed=1, num_logprobs=3, grammar=SCHEMA)
    tokens = generated(session, sampling)
    expected = logits(session, ids(tokens)).log_softmax(dim=-1)
    for row, token in zip(expected, tokens, strict=True):
        assert token.logprobs.chosen == pytest.approx(float(row[token.token_id]), abs=1e-5)
        assert [one for one, _ in token.logprobs.top] == row.topk(3).indices.tolist()
    [alone] = generated(session, Sampling(1, num_logprobs=0))
    assert isinstance(alone.logprobs, Logprobs) and alone.logprobs.top == ()
