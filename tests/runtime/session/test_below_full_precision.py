"""Below full precision: logits computed on replicas are those of the plain model with the replicas'
weights."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from artifacts.errors import BadInput
from artifacts.shape import FULL_BITS
from runtime.control.counters import AT_BITS
from runtime.model.layout import aligned
from runtime.model.open import MoeModel, open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session
from runtime.session.settings import EXACT, FUSED, Settings
from runtime.tiers.replica_store import open_replicas
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY
from tests.runtime.session.test_session import plain_model
from tools.gpu.checks.made_replicas import made, put

PROMPT = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
NEXT = torch.tensor([[7]])


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PreTrainedModel, MoeModel, Artefacts]]:
    folder = checkpoint(request.param, "hub", "float32")
    opened = open_model(str(folder))
    yield (
        plain_model(folder),
        opened,
        Artefacts(replicas=made(opened, tmp_path_factory.mktemp("replicas"))),
    )
    opened.store.close()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 2e-4 * theirs.abs().max(), (ours - theirs).abs().max()


@pytest.mark.parametrize(
    "settings",
    [
        Settings("uniform-bits", policies={"residency": "shadow:bits=3,slots=no"}, budget="60%"),
        Settings("shadow", budget="13%"),
        Settings("shadow", budget="13%", experts=FUSED),
    ],
    ids=["uniform", "mixed", "mixed, all fused"],
)
def test_resident_replicas(case: tuple, settings: Settings) -> None:
    plain, opened, artefacts = case
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        ours = session.forward(PROMPT)
        ahead = session.forward(NEXT, past=ours.past_key_values).logits
        put(plain, opened, artefacts.replicas, session.controller.cache.shadows)
        theirs = plain(PROMPT, use_cache=True)
        assert_same(ours.logits, theirs.logits)
        assert_same(ahead, plain(NEXT, past_key_values=theirs.past_key_values).logits)
        receipt = session.receipt()
        totals = session.controller.counters.totals()
    assert len(session.parts.slots) == 0 and sum(session.engine.stall_s) == 0
    assert totals["low"] == totals["misses"] == totals["requests"]
    assert sum(totals[name] for name in AT_BITS.values()) == totals["requests"]
    assert sum(receipt["replicas"]["resident"].values()) == opened.shape.num_keys
    assert (
        receipt["fast_bytes"] == receipt["replicas"]["resident_bytes"] <= opened.shape.nbytes * 0.6
    )


@pytest.mark.parametrize("experts", [EXACT, FUSED])
def test_settled_layers_give_the_results_of_decided_ones(
    case: tuple, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller decides every step while `on_step` is set, and no step of a single token
    otherwise."""
    _, opened, artefacts = case
    results = []
    for listens in (False, True):
        with Session(
            opened, Settings("shadow", budget="13%", experts=experts), artefacts=artefacts
        ) as session:
            session.watcher.on_step = (lambda step: None) if listens else None
            past = session.forward(PROMPT).past_key_values
            decided = Mock(wraps=session.controller.step)
            monkeypatch.setattr(session.controller, "step", decided)
            logits = [
                session.forward(torch.tensor([[token]]), past=past).logits for token in range(3, 8)
            ]
            assert session.controller.holds_low
            assert decided.call_count == (5 * opened.shape.num_layers if listens else 0)
            results.append((torch.cat(logits), session.controller.counters.by_layer()))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("link", ["disk", "1GB/s"])
def test_fetched_replicas(case: tuple, link: str) -> None:
    """Every miss is fetched at 1 bit, and so every expert is computed at 1 bit."""
    plain, opened, artefacts = case
    settings = Settings(
        policies={"miss": "fetch_lowest"}, budget=f"{opened.shape.num_layers}x", link=link
    )
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        ours = session.forward(PROMPT).logits
        totals = session.controller.counters.totals()
        put(plain, opened, artefacts.replicas, np.ones(opened.shape.num_keys, np.int64))
        assert_same(ours, plain(PROMPT).logits)
    assert totals["at_1_bit"] == totals["requests"]
    assert totals["demand_bytes"] == totals["fetched"] * artefacts.replicas.nbytes[1]


@pytest.mark.parametrize("link", ["disk", "1GB/s"])
def test_cold_experts_are_computed_near_at_the_bits_of_the_placement(
    case: tuple, link: str
) -> None:
    plain, opened, artefacts = case
    settings = Settings(
        "context-aware", budget=f"{opened.shape.num_layers}x", link=link, window="1KiB"
    )
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        put(plain, opened, artefacts.replicas, np.full(opened.shape.num_keys, FULL_BITS))
        ours = session.forward(PROMPT)
        theirs = plain(PROMPT, use_cache=True)
        assert_same(ours.logits, theirs.logits)
        cache = session.controller.cache
        # and serves the next token still
        was_resident = np.array([place is not None for place in cache.places])
        ahead = session.forward(NEXT, past=ours.past_key_values).logits
        bits = cache.near_bits
        put(plain, opened, artefacts.replicas, np.where(was_resident, FULL_BITS, bits))
        assert_same(ahead, plain(NEXT, past_key_values=theirs.past_key_values).logits)
        for token in range(3, 9):  # an expert that serves a token is evicted only after it
            session.forward(torch.tensor([[token]]), past=ours.past_key_values)
        totals = session.controller.counters.totals(first_pass=1)
        placed = np.array([place is not None for place in cache.places])
    assert totals["fetched"] == 0 and totals["near"] > 0 and totals["prefetch_bytes"] > 0
    assert (bits[placed] == FULL_BITS).all() and placed.sum() == opened.shape.num_layers
    cold = bits.reshape(len(opened.layers), -1)
    assert all((row[row < FULL_BITS]).mean() <= 3 for row in cold)


def test_a_prompt_that_is_read_again_has_its_cold_experts_at_the_bits_of_the_placement(
    case: tuple,
) -> None:
    plain, opened, artefacts = case
    settings = Settings("context-aware", budget=f"{opened.shape.num_layers}x", window="1KiB")
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        session.forward(PROMPT)
        cache = session.controller.cache
        was_resident = np.array([place is not None for place in cache.places])
        again = session.reread(PROMPT).logits
        bits = np.where(was_resident, FULL_BITS, cache.near_bits)
        totals = session.controller.counters.totals(first_pass=1)
    put(plain, opened, artefacts.replicas, bits)
    assert_same(again, plain(PROMPT).logits)
    assert totals["near"] > 0 and totals["fetched"] == 0 and (bits < FULL_BITS).any()


def test_damaged_missing_and_foreign_files_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    replicas = made(opened, tmp_path)
    store = open_replicas(opened, replicas, [2])[2]
    out = aligned(store.layout.nbytes)
    store.read(0, 1, out)
    damaged = replicas.files[1]
    damaged.write_bytes(damaged.read_bytes()[: -replicas.nbytes[4] - replicas.nbytes[3] - 40])
    with pytest.raises(
        BadInput, match="changed while in use and is damaged: run moectl quantize again"
    ):
        store.read(0, 1, out)
    with pytest.raises(BadInput, match="truncated or no safetensors"):
        open_replicas(opened, replicas, [2])
    damaged.unlink()
    with pytest.raises(BadInput, match="cannot be read .*run moectl quantize again"):
        store.read(0, 1, out)
    made(opened, tmp_path)
    (tmp_path / "foreign").mkdir()
    foreign = (
        made(open_model(str(checkpoint("gpt_oss"))), tmp_path / "foreign").files[:1]
        + replicas.files[1:]
    )
    with pytest.raises(
        BadInput, match="holds replicas of another model: run moectl quantize again"
    ):
        open_replicas(opened, dataclasses.replace(replicas, files=foreign), [2])
