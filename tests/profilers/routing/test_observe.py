"""Observed routing, compared with a plain count of the router logits that transformers returns."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.errors import BadUsage
from artifacts.routing.coactivation import renormalised
from artifacts.routing.entropy import EntropyHistogram
from artifacts.traces.trace import DECODE, PREFILL, Trace, concatenate
from profilers.compare.quality import read
from profilers.routing.maps import observe_iterations
from profilers.routing.observe import RoutingForesight, RoutingProfile, observe
from profilers.text.batches import Batching
from runtime.control.build import build_controller
from runtime.model.layout import ExpertStore
from runtime.model.open import MoeModel, open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope, preset
from runtime.replay.from_trace import iterations
from runtime.replay.replay import replay
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY

PREFILL_LENGTH = 6
LENGTHS = (
    12,
    9,
    3,
    12,
    7,
    1,
    12,
    2,
    10,
    6,
    12,
)  # unequal, so that batches are padded; some have no decode
BATCHING = Batching(batch=4, length=12, prefill=PREFILL_LENGTH)


def random_sequences() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(3, VOCABULARY, length) for length in LENGTHS]


SEQUENCES = random_sequences()


def profile_and_trace(
    opened: MoeModel, batching: Batching = BATCHING, **settings: str
) -> tuple[RoutingProfile, Trace | None]:
    profile = RoutingProfile(opened.shape.num_layers, opened.shape.num_experts)
    with Session(opened, Settings(**settings)) as session:
        batches = batching.batches(SEQUENCES)
        parts = observe(
            session,
            batches,
            prefill=batching.prefill,
            profile=profile,
            keep_trace=RoutingForesight(),
        )
        return profile, concatenate([trace for _, trace in parts])


def test_a_trace_has_the_iterations_that_expert_maps_are_made_of(opened: MoeModel) -> None:
    _, trace = profile_and_trace(opened)
    with Session(opened, Settings()) as session:
        seen = [
            part
            for _, part in observe_iterations(
                session, BATCHING.batches(SEQUENCES), prefill=PREFILL_LENGTH
            )
        ]
    embeddings, probabilities = iterations(trace, opened.shape)
    assert np.array_equal(embeddings, np.concatenate([part.embeddings for part in seen]))
    assert probabilities == pytest.approx(
        np.concatenate([part.probabilities for part in seen]), abs=1e-6
    )


def assert_equal(first: RoutingProfile, second: RoutingProfile) -> None:
    """Equal bit for bit."""
    ours = first.arrays()
    theirs = second.arrays()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def assert_equal_traces(first: Trace, second: Trace) -> None:
    ours = first.columns()
    theirs = second.columns()
    assert ours.keys() == theirs.keys()
    given = [trace.embeddings[trace.iteration] for trace in (first, second)]
    assert np.array_equal(*given)
    del ours["iteration"]  # shards number iterations in their own order
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def selections(folder: object, top_k: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Yield for every token, one sequence at a time without padding: position, layer, its experts
    and their p~."""
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    for sequence in SEQUENCES:
        with torch.inference_mode():
            said = plain(
                input_ids=torch.from_numpy(sequence)[None], output_router_logits=True
            ).router_logits
        for layer, logits in enumerate(said):
            share, experts = logits.double().softmax(-1).topk(top_k)
            share /= share.sum(-1, keepdim=True)
            for position in range(len(sequence)):
                yield position, layer, experts[position].numpy(), share[position].numpy()


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_moe", "gpt_oss"])
def test_counts_are_those_of_the_plain_model(family: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(family)
    opened = open_model(str(folder))
    profile, _ = profile_and_trace(opened, budget="25%" if family == "olmoe" else "50%")
    num_layers = opened.shape.num_layers
    num_experts = opened.shape.num_experts
    use = np.zeros((num_layers, 2, num_experts), int)
    share = np.zeros((num_layers, 2, num_experts))
    pairs = np.zeros((num_layers, num_experts, num_experts), int)
    weighted = np.zeros((num_layers,) + (num_experts,) * 2)
    entropies: list[list[float]] = [[] for _ in range(num_layers)]
    for position, layer, experts, p in selections(folder, opened.shape.top_k):
        use[layer, int(position >= PREFILL_LENGTH), experts] += 1
        share[layer, int(position >= PREFILL_LENGTH), experts] += p
        for i, p_i in zip(experts, p, strict=True):
            for j, p_j in zip(experts, p, strict=True):
                if i != j:
                    pairs[layer, i, j] += 1
                    weighted[layer, i, j] += min(p_i, p_j)
        entropies[layer].append(float(-(p * np.log(p)).sum() / np.log(len(p))))
    arrays = profile.arrays()
    assert np.array_equal(arrays["use"], use)
    assert use.sum() == sum(LENGTHS) * num_layers * opened.shape.top_k
    assert np.array_equal(arrays["pairs"], pairs)
    np.testing.assert_allclose(arrays["share"], share, rtol=0, atol=1e-4)
    np.testing.assert_allclose(arrays["weighted"], weighted, rtol=0, atol=1e-4)
    for layer, values in enumerate(entropies):
        assert_percentiles(profile.entropy[layer].percentiles(), np.array(values))


def assert_percentiles(percentiles: np.ndarray, values: np.ndarray) -> None:
    """At most p % of the values are below the p-th percentile and at least p % not above it, up to
    a bin's width."""
    grain = 1.5 / EntropyHistogram.NUM_BINS
    for percent, value in enumerate(percentiles):
        assert (values < value - grain).mean() <= percent / 100 + 1e-9
        assert (values <= value + grain).mean() >= percent / 100 - 1e-9


@pytest.mark.parametrize(
    "settings", [{"budget": "2x"}, {"budget": "3x", "preset": "specmd"}, {"link": "1GB/s"}]
)
def test_numbers_do_not_depend_on_the_budget(settings: dict[str, str], opened: MoeModel) -> None:
    profile, trace = profile_and_trace(opened, **settings)
    everything, whole_trace = profile_and_trace(opened, preset="full")
    assert_equal(profile, everything)
    assert_equal_traces(trace, whole_trace)


class CountingStore(ExpertStore):
    """A store that records its reads."""

    def __init__(self, opened: MoeModel) -> None:
        self._store = opened.store
        self.layout = opened.store.layout
        self.shape = opened.shape
        self.reads: list[tuple[int, int]] = []

    def read(self, layer: int, expert: int, out: torch.Tensor) -> None:
        self.reads.append((layer, expert))
        self._store.read(layer, expert, out)

    def check_unchanged(self) -> None:
        self._store.check_unchanged()


def test_an_expert_is_loaded_once_a_batch(opened: MoeModel) -> None:
    store = CountingStore(opened)
    profile = RoutingProfile(opened.shape.num_layers, opened.shape.num_experts)
    with Session(replace(opened, store=store), Settings(budget="2x")) as session:
        for _ in observe(
            session, BATCHING.batches(SEQUENCES), prefill=PREFILL_LENGTH, profile=profile
        ):
            assert len(set(store.reads)) == len(store.reads)
            store.reads.clear()
        totals = session.controller.counters.totals()
    assert 0 < totals["demand_bytes"] <= totals["requests"] * opened.shape.expert_nbytes


def test_arrays_give_the_profile_back(opened: MoeModel) -> None:
    profile, _ = profile_and_trace(opened)
    again = RoutingProfile.from_arrays(profile.arrays())
    assert_equal(again, profile)


@pytest.mark.parametrize("prefill", [PREFILL_LENGTH, 1, 0])
def test_a_trace_has_a_prefill_and_a_pass_for_every_later_token(
    prefill: int, opened: MoeModel
) -> None:
    _, trace = profile_and_trace(opened, replace(BATCHING, prefill=prefill))
    rows = zip(
        *(column.tolist() for column in (trace.request, trace.pass_, trace.layer, trace.token)),
        strict=True,
    )
    expected = [
        (request, max(0, token - prefill + 1) if prefill else token, layer, token)
        for request, length in enumerate(LENGTHS)
        for token in range(length)
        for layer in range(opened.shape.num_layers)
    ]
    assert list(rows) == sorted(expected)
    assert np.array_equal(trace.phase, np.where(trace.token < prefill, PREFILL, DECODE))
    assert np.isfinite(renormalised(trace.weights)).all()
    passes = [max(1, length - prefill + 1) if prefill else length for length in LENGTHS]
    assert trace.pass_indices().max() + 1 == sum(passes)


@pytest.mark.parametrize("name", ["on-demand", "near"])
def test_a_trace_replays_as_the_tokens_decode_live(name: str, opened: MoeModel) -> None:
    """The profile runs whole sequences at once; its trace is that of decoding token by token."""
    _, trace = profile_and_trace(opened)
    settings = Settings(preset=name, budget="25%")
    with Session(opened, settings) as session:
        read(session, SEQUENCES, prefill=PREFILL_LENGTH)
        live = session.controller.counters.by_layer()
    replayed = build_controller(
        build(preset(name).texts()),
        opened.shape,
        num_slots=opened.shape.num_keys // 4,
        scope=Scope.LAYER,
        window=0,
        artefacts=Artefacts(),
    )
    replay(trace, replayed)
    assert replayed.counters.by_layer() == live


def test_a_trace_says_what_the_next_routers_would(opened: MoeModel) -> None:
    """The predictions equal those that a live run with that prefetching records, up to rounding."""
    _, trace = profile_and_trace(opened)
    with Session(opened, Settings(policies={"prefetch": "next_gate"}, budget="50%")) as session:
        recorder = session.record()
        read(session, SEQUENCES, prefill=PREFILL_LENGTH)
    live = recorder.trace()
    ours, theirs = (
        one.take(np.lexsort((one.layer, one.token, one.request))) for one in (trace, live)
    )
    assert ours.predicted.shape == (len(trace), 1, opened.shape.num_experts)
    np.testing.assert_allclose(ours.predicted, theirs.predicted, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"length": 1},
        {"prefill": -1},
        {"index": 2, "count": 2},
        {"index": -1, "count": 2},
    ],
)
def test_batching_that_cannot_be(options: dict[str, int]) -> None:
    with pytest.raises(BadUsage):
        Batching(**options)
