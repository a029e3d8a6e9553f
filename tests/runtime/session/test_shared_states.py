"""Models with linear attention, short convolutions or windows share passes and beginnings as others
do: their requests get what they get alone."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest
import torch
from transformers.utils import logging

from runtime.model.open import open_model
from runtime.session.generation import batch as batch_module
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.round_robin import open_batch
from runtime.session.generation.sampling import Sampler, Sampling, draw
from runtime.session.session import Session
from runtime.session.settings import Settings
from tools.make.families import tiny

pytestmark = pytest.mark.slow

STATES = (
    "bailing_hybrid",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp_text",
)
# an embedding of n-grams, whose last tokens and convolution are states too
SIZES = {
    "qwen4_exp_text": {
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "ngram_vocab_size_base": 100,
        "ple_embed_dim": 32,
        "ple_layer_ids": [1],
    }
}
WINDOWS = ("gemma4", "gpt_oss", "mixtral", "phimoe")
_BOUNDS = {"nemotron_h": 1e-4}  # so far apart are transformers' two forms of its layers
TILE = 8
KNOWN = 2 * TILE
BASE = [5, 9, 2, 14, 7, 7, 3, 1, 4, 1, 5, 9, 2, 6, 8, 8, 6, 40, 41, 42]


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    logging.disable_progress_bar()
    family = request.param
    model = tiny(family, SIZES.get(family, {}))
    if family in WINDOWS:
        model.config.get_text_config().sliding_window = 6
    path = tmp_path_factory.mktemp(family)
    model.save_pretrained(path)
    with Session(open_model(str(path)), Settings(budget="50%", threads=1)) as session:
        yield session


of_each_family = pytest.mark.parametrize("session", [*STATES, *WINDOWS], indirect=True)
with_states = pytest.mark.parametrize("session", ["lfm2_moe", "qwen4_exp_text"], indirect=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[Sampler, list[torch.Tensor]]:
    """The logits that each request's tokens are drawn from."""
    logits_of = defaultdict(list)

    def seen_draw(samplers: list[Sampler], logits: torch.Tensor) -> list:
        for sampler, row in zip(samplers, logits, strict=True):
            logits_of[sampler].append(row)
        return draw(samplers, logits)

    monkeypatch.setattr(batch_module, "draw", seen_draw)
    return logits_of


def sampling(num_tokens: int = 3) -> Sampling:
    return Sampling(max_new_tokens=num_tokens, ignore_eos=True)


def one_by_one(
    batch: RequestBatch, prompts: Iterable[Sequence[int]], *, cuts: Iterable[int] = ()
) -> list[int]:
    """Answer each prompt once the one before is answered; returns how much of it was known."""
    reused = []
    for ids in prompts:
        batch.add(torch.tensor([ids]), sampling())
        for row in batch._waiting.values():
            row.prompt.cuts.update(cuts)
        while not batch.is_idle:
            [result] = batch.step()
            assert result.error is None
        reused.append(result.num_reused)
    return reused


def logits_alone(session: Session, sampler: Sampler, num_drawn: int) -> Iterator[torch.Tensor]:
    """The logits of a prompt and of the tokens after it, one by one."""
    begin = sampler.tokens.shape[1] - num_drawn
    past = None
    for end in range(begin, sampler.tokens.shape[1]):
        done = past.get_seq_length() if past else 0
        output = session.forward(sampler.tokens[:, done:end], past=past)
        past = output.past_key_values
        yield output.logits[0, -1]


@of_each_family
def test_requests_that_come_in_any_order_get_what_they_get_alone(
    session: Session, seen: dict[Sampler, list[torch.Tensor]]
) -> None:
    """Their prompts begin alike, and join, wait for each other, end and leave at random."""
    random = Random(session.opened.family)
    answers = defaultdict(list)
    expected = {}
    num_reused = {}
    left = []
    with open_batch(session, rows=3, tile=TILE) as batch:
        assert isinstance(batch, RequestBatch)
        while len(expected) < 7 or not batch.is_idle:
            if len(expected) < 7 and random.random() < 0.5:
                ids = (BASE + BASE)[: random.choice([1, 16, 20, 24, 32, 40])]
                ids += random.choices(range(3, 60), k=random.randint(0, 9))
                asked = sampling(random.randint(1, 5))
                number = batch.add(torch.tensor([ids]), asked)
                expected[number] = (ids, asked)
            elif random.random() < 0.05 and batch._running:
                left.append(next(iter(batch._running)))
                batch.cancel(left[-1])
            for result in batch.step():
                answers[result.request].append(result.token_id)
                num_reused[result.request] = result.num_reused
        assert not batch.memory.blocks
    for number, (ids, asked) in expected.items():
        alone = [token.token_id for token in session.tokens(torch.tensor([ids]), asked)]
        found = [token for token in answers[number] if token is not None]
        assert found == alone[: len(found)] and (len(found) == len(alone) or number in left)
    assert sum(num_reused.values()) > 0
    for sampler, logits in seen.items():
        whole = torch.stack([*logits_alone(session, sampler, len(logits))])
        bound = _BOUNDS.get(session.opened.family, 1e-5) * whole.abs().max()
        assert (torch.stack(logits) - whole).abs().max() <= bound


@of_each_family
def test_logits_after_a_known_beginning_are_those_of_the_same_tiles_to_the_bit(
    session: Session, seen: dict[Sampler, list[torch.Tensor]]
) -> None:
    prompts = [BASE[:KNOWN] + tail for tail in ([50, 51], [52, 53, 54, 55, 56, 57, 58, 59, 60, 61])]
    with RequestBatch(session, rows=1, tile=TILE) as batch:
        assert one_by_one(batch, prompts) == [0, KNOWN]
    with RequestBatch(session, rows=1, tile=TILE, kept_nbytes=0) as batch:
        assert one_by_one(batch, prompts) == [0, 0]
    _, reused, _, fresh = map(torch.stack, seen.values())
    assert torch.equal(reused, fresh)


@with_states
def test_states_are_kept_where_two_prompts_part(
    session: Session, seen: dict[Sampler, list[torch.Tensor]]
) -> None:
    """The second prompt finds no states there and leaves some, from which the third goes on."""
    prompts = [BASE + tail for tail in ([50, 51], [52, 53, 54, 55, 56], [57, 58, 59, 60])]
    with RequestBatch(session, rows=1, tile=32) as batch:
        assert one_by_one(batch, prompts) == [0, 0, len(BASE)]
        assert one_by_one(batch, [[*prompts[0], 60]]) == [len(prompts[0])]  # a further turn
    with RequestBatch(session, rows=1, tile=32, kept_nbytes=0) as batch:
        one_by_one(batch, prompts, cuts=[len(BASE)])
    _, second, third, _, _, *fresh = map(torch.stack, seen.values())
    assert torch.equal(second, fresh[0]) and torch.equal(third, fresh[1])


@with_states
def test_a_beginning_of_prompts_that_come_together_is_read_once(session: Session) -> None:
    """The first keeps states where the others part from it, and they wait until it is there."""
    prompts = [BASE + tail for tail in ([50, 51], [52, 53, 54], [57])]
    with RequestBatch(session, rows=3, tile=32) as batch:
        one_by_one(batch, [[11]])  # tells the bytes of a token
        for ids in prompts:
            batch.add(torch.tensor([ids]), sampling())
        reused = {}
        while not batch.is_idle:
            reused |= {result.request: result.num_reused for result in batch.step()}
    assert [*reused.values()] == [0, len(BASE), len(BASE)]


@with_states
def test_bytes_of_states_are_counted_and_bounded(session: Session) -> None:
    prompts = [[first, *BASE, *BASE] for first in range(50, 56)]
    with RequestBatch(session, rows=1, tile=TILE) as batch:
        one_by_one(batch, prompts[:1])
        keys = 64 * batch.memory.token_nbytes
        states = batch.memory.states_nbytes
        assert states > 0 and batch.kept.nbytes == keys + 3 * states  # after 16, 32 and 41 tokens
    most = 2 * (keys + 3 * states)
    with RequestBatch(session, rows=1, tile=TILE, kept_nbytes=most) as batch:
        one_by_one(batch, prompts)
        assert batch.kept.nbytes == most
        assert batch.memory.row_nbytes(len(prompts[0])) == keys + states
    room = 2 * (2 * keys + states + 5 * states)
    with RequestBatch(session, rows=4, tile=TILE, room=room) as batch:
        one_by_one(batch, prompts[:1])
        for ids in prompts:
            batch.add(torch.tensor([ids]), sampling())
        batch.step()
        assert batch.num_running == 2
