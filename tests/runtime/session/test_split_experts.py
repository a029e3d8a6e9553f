"""Split experts: exact for every family, ratio and budget; segments, pools and sizes as counted by
hand."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from artifacts.errors import BadUsage, Incompatible
from artifacts.hardware.machines import HERE
from artifacts.shape import Shape
from artifacts.splits.solve import SolvedSplit
from runtime.control.build import build_controller
from runtime.control.cache import LOADING, RESIDENT, Cache
from runtime.control.plan import Plan
from runtime.control.pools import Partitions
from runtime.control.segments import Segments, segment_pools
from runtime.control.sizes import budget_nbytes
from runtime.model.arithmetic import expert_forward
from runtime.model.layout import aligned
from runtime.model.open import MoeModel, open_model
from runtime.policies import build
from runtime.policies.base import Artefacts, Split, Step
from runtime.policies.presets import Scope
from runtime.session.session import Session
from runtime.session.settings import Settings
from runtime.tiers.neuron_major import NeuronLayout, project_segment
from runtime.tiers.slow_split import SegmentTier
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY
from tests.runtime.session.test_session import plain_model

THETAS = (0.1, 0.37, 0.5, 1.0)
PROMPT = torch.randint(3, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
NEXT = torch.tensor([[5], [6], [7]])


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, checkpoint: Checkpoint
) -> Iterator[tuple[PreTrainedModel, MoeModel]]:
    folder = checkpoint(request.param)
    opened = open_model(str(folder))
    yield plain_model(folder), opened
    opened.store.close()


def split_run(
    opened: MoeModel, theta: float, *, budget: str, link: str, **policies: str
) -> Session:
    texts = {"residency": f"split:theta={theta}"} | policies
    return Session(
        opened, Settings("moepic", policies=texts, budget=budget, link=link, window="3KiB")
    )


def assert_exact(session: Session, plain: PreTrainedModel) -> None:
    """The logits of a prompt and of a token after it are the plain model's within 1e-5,
    relative."""
    with session, torch.inference_mode():
        ours = session.forward(PROMPT)
        ahead = session.forward(NEXT, past=ours.past_key_values).logits
        session.controller.cache.validate()
        theirs = plain(PROMPT, use_cache=True)
        expected = plain(NEXT, past_key_values=theirs.past_key_values).logits
    for mine, right in ((ours.logits, theirs.logits), (ahead, expected)):
        assert (mine - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("link", ["disk", "1GB/s"])
@pytest.mark.parametrize("prefetch", ["none", "next_gate"])
def test_logits_are_those_of_the_plain_model(
    pair: tuple, theta: float, link: str, prefetch: str
) -> None:
    plain, opened = pair
    for budget in (f"{opened.shape.num_layers}x", "60%", "100%"):
        assert_exact(split_run(opened, theta, budget=budget, link=link, prefetch=prefetch), plain)


@pytest.mark.parametrize("theta", THETAS)
def test_every_budget_from_one_expert_a_layer_runs_within_it(
    checkpoint: Checkpoint, theta: float
) -> None:
    folder = checkpoint("gpt_oss")
    plain = plain_model(folder)
    opened = open_model(str(folder))
    for count in range(opened.shape.num_layers, opened.shape.num_keys + 1):
        session = split_run(opened, theta, budget=f"{count}x", link="disk")
        held = sum(
            map(len, (session.parts.slots[slot] for slot in range(len(session.parts.slots))))
        )
        assert held <= count * opened.shape.expert_nbytes
        assert_exact(session, plain)
    assert (
        session.parts.fast.holds(opened.shape)
        and session.controller.counters.totals()["evictions"] == 0
    )


def test_near_and_stand_ins_take_all_segments_of_an_expert(checkpoint: Checkpoint) -> None:
    folder = checkpoint("gpt_oss")
    plain = plain_model(folder)
    opened = open_model(str(folder))
    session = split_run(
        opened, 0.37, budget="30%", link="1GB/s", miss="near:fill=no", prefetch="none"
    )
    assert_exact(session, plain)
    totals = session.controller.counters.totals()
    assert totals["near"] == totals["misses"] > 0 and totals["demand_bytes"] == 0
    with split_run(
        opened, 0.37, budget="60%", link="1GB/s", miss="random_resident:fill=no"
    ) as session:
        assert session.forward(PROMPT).logits.isfinite().all()


def test_what_cannot_be_split_is_refused_in_one_line(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    with pytest.raises(BadUsage, match="does not hold one expert a layer: give at least 2x"):
        split_run(opened, 0.5, budget="1x", link="disk")
    with pytest.raises(BadUsage, match="above 0 and at most 1, not 0"):
        split_run(opened, 0, budget="50%", link="disk")
    opened.layers[0].experts.has_post_expert_norm = True
    with pytest.raises(Incompatible, match="cannot be split"):
        split_run(opened, 0.5, budget="50%", link="disk")


def solved(opened: MoeModel, budget: str) -> SolvedSplit:
    """A split whose layers differ in ratio and budget, solved for this machine."""
    num_layers = opened.shape.num_layers
    nbytes = budget_nbytes(budget, opened.shape)
    budgets = nbytes / opened.shape.expert_nbytes / num_layers + np.linspace(-1, 1, num_layers)
    return SolvedSplit(nbytes, HERE, budgets, np.linspace(0.3, 1, num_layers))


def test_ratios_and_budgets_come_from_the_store(pair: tuple) -> None:
    plain, opened = pair
    settings = Settings(
        "moepic", policies={"residency": "split:theta=None"}, budget="60%", link="1GB/s"
    )
    with pytest.raises(
        Incompatible, match="needs splits, which the store does not hold: run `moectl split`"
    ):
        Session(opened, settings)
    artefacts = Artefacts(splits=(solved(opened, "50%"), solved(opened, "60%")))
    session = Session(opened, settings, artefacts=artefacts)
    assert_exact(session, plain)
    split = session.parts.fast.split
    shape = opened.shape
    assert split.top_neurons.tolist() == [
        shape.top_neurons(theta) for theta in artefacts.splits[1].theta
    ]
    assert session.parts.slots.nbytes <= 0.6 * shape.nbytes + 64 * len(session.parts.slots)
    assert session.receipt()["split"]["tops"] == " ".join(map(str, split.num_tops))


def test_moepic_follows_a_split_that_fits_and_says_when_there_is_none(
    checkpoint: Checkpoint,
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    known = Artefacts(splits=(solved(opened, "60%"),))
    with Session(
        opened, Settings("moepic", budget="60%", link="1GB/s"), artefacts=known
    ) as session:
        assert session.receipt()["split"]["theta"] == "0.292 1" and session.fallbacks == []
    for settings, artefacts in (
        (Settings("moepic", budget="60%", link="1GB/s"), Artefacts()),
        (Settings("moepic", budget="50%", link="1GB/s"), known),
        (Settings("moepic", budget="60%", scaled_to="5gbps"), known),
    ):
        with Session(opened, settings, artefacts=artefacts) as session:
            assert session.receipt()["split"]["theta"] == "0.5 0.5"
            assert [note for note in session.fallbacks if "experts are cut at theta=0.5" in note]


def test_a_split_over_another_link_is_another_machines(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    known = Artefacts(splits=(replace(solved(opened, "60%"), link="disk"),))
    settings = Settings(
        "moepic", policies={"residency": "split:theta=None"}, budget="60%", link="1GB/s"
    )
    with pytest.raises(
        Incompatible,
        match="another machine .here over disk, not here over 1GB/s.: run `moectl split`",
    ):
        Session(opened, settings, artefacts=known)
    with Session(opened, replace(settings, link="disk"), artefacts=known) as session:
        assert session.parts.fast.split.solved is known.splits[0]


def test_a_split_made_for_something_else_is_refused_in_one_line(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    texts = {"residency": "split:theta=None"}
    fitting = solved(opened, "60%")
    foreign = SolvedSplit(fitting.budget_nbytes, HERE, np.ones(5), np.ones(5))
    for settings, split, message in (
        (Settings("moepic", policies=texts, budget="40%"), fitting, "for another budget"),
        (
            Settings("moepic", policies=texts, budget="60%", scaled_to="5gbps"),
            fitting,
            "another machine .here, not 5gbps",
        ),
        (
            Settings("moepic", policies=texts, budget="60%"),
            foreign,
            "is of 5 layers, the model has 2",
        ),
    ):
        with pytest.raises(Incompatible, match=message) as caught:
            Session(opened, settings, artefacts=Artefacts(splits=(split,)))
        assert "\n" not in str(caught.value)


# Counted by hand

SHAPE = Shape(
    num_layers=2, num_experts=3, top_k=1, expert_nbytes=100, num_neurons=8, neuron_nbytes=12
)


def test_a_top_has_at_least_one_neuron_and_the_bytes_outside_neurons() -> None:
    assert [SHAPE.top_neurons(theta) for theta in (0.01, 0.37, 0.5, 1)] == [1, 3, 4, 8]
    assert SHAPE.segment_nbytes(3) == (40, 60)
    assert SHAPE.segment_nbytes(8) == (100, 0)
    assert Shape(1, 1, 1, 100).segment_nbytes(37) == (37, 63)  # neurons unknown: cut to the byte


def test_bottoms_have_the_keys_of_further_layers() -> None:
    segments = Segments(SHAPE, Split(np.array([3, 8]), np.array([2, 1]), 1))
    assert segments.of([1, 0]) == [1, 7, 0, 6]
    assert segments.of([4]) == [4], "layer 1 is not cut"
    assert segments.num_bytes([1, 7, 4]) == 40 + 60 + 100
    state = np.array([2, 2, 1, 2, 0, 0, 2, 0, 2, 0, 0, 0], np.uint8)
    assert segments.layer_states(state, 0).tolist() == [2, 0, 1]
    assert segments.layer_states(state, 1).tolist() == [2, 0, 0]


def test_tops_have_pools_by_layer_and_bottoms_share_one() -> None:
    split = Split(np.array([3, 4]), np.array([2, 1]), 5)
    pools = segment_pools(SHAPE, split, is_global=False)
    assert [(pool.first, pool.stop, pool.num_slots, pool.slot_nbytes) for pool in pools] == [
        (0, 3, 2, 40),
        (3, 6, 1, 52),
        (6, 12, 5, 60),
    ]
    with pytest.raises(BadUsage, match="use --scope layer"):
        segment_pools(SHAPE, split, is_global=True)


def test_the_least_recently_used_bottom_is_evicted_first() -> None:
    split = Split(np.array([3, 3]), np.array([1, 1]), 4)
    cache = Cache(SHAPE, segment_pools(SHAPE, split, is_global=False))
    for key in (6, 7, 8, 9):
        cache.admit([key], LOADING if key == 7 else RESIDENT)
    cache.touch([0, 6])
    cache.pins[8] = True
    assert cache.oldest(6, 1) == [9], "7 is loading, 8 is pinned, 6 was used last"
    assert cache.oldest(6, 4) == [9, 6]
    cache.evict([9])
    assert cache.oldest(6, 4) == [6]


def test_bottoms_are_evicted_for_their_own_device_only() -> None:
    split = Split(np.array([3, 3]), np.array([2, 2]), 4)
    two = Partitions(SHAPE.num_experts, 2)
    cache = Cache(
        SHAPE, segment_pools(SHAPE, split, is_global=False, partitions=two), partitions=two
    )
    for key in (7, 6, 8, 10):  # of experts 1, 0, 2, 1
        cache.admit([key], RESIDENT)
    assert cache.oldest(6, 4) == [6, 8] and cache.oldest(7, 4) == [7, 10]
    assert cache.by_pool([0, 6, 1, 7, 2, 8]) == [[0, 2], [1], [6, 8], [7]]


def test_segments_add_up_to_the_expert_and_lie_in_one_piece(pair: tuple) -> None:
    _, opened = pair
    shape = opened.shape
    store = opened.store
    module = opened.layers[0].experts
    neurons = shape.top_neurons(0.37)
    cut = Split(np.full(shape.num_layers, neurons), np.full(shape.num_layers, 1), 1)
    tier = SegmentTier.of(opened, Segments(shape, cut), in_ram=False)
    layout = NeuronLayout.of(opened.layers[0], store.layout.dtype, shape.expert_nbytes)
    stored = aligned(shape.expert_nbytes)
    packed = aligned(shape.expert_nbytes)
    store.read(1, 2, stored)
    layout.pack(store.layout.views(stored), packed)
    sizes = shape.segment_nbytes(neurons)
    top, bottom = (aligned(size) for size in sizes)
    tier.read(1, 2, top)
    tier.read(shape.num_layers + 1, 2, bottom)
    head = layout.head * layout.dtype.itemsize
    assert torch.equal(packed[head:], torch.cat((top[head:], bottom)))
    x = torch.randn(4, layout.hidden)
    whole = expert_forward(module, store.layout.views(stored), x)
    views = (layout.views(top, has_head=True), layout.views(bottom, has_head=False))
    assert views[0]["down"].shape[0] == neurons
    parts = [expert_forward(module, view, x, project=project_segment) for view in views]
    assert (sum(parts) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_a_resident_top_hits_and_its_bottom_is_loaded() -> None:
    texts = {
        "routing": "standard",
        "prefetch": "none",
        "eviction": "lcp",
        "miss": "fetch",
        "residency": "split",
    }
    split = Split(np.array([3, 3]), np.array([2, 2]), 1)
    owner = build_controller(
        build(texts),
        SHAPE,
        num_slots=5,
        scope=Scope.LAYER,
        window=0,
        artefacts=Artefacts(),
        split=split,
    )

    def take(layer: int, expert: int) -> Plan:
        return owner.step(Step(0, 1, layer, np.array([[expert]]), np.ones((1, 1), np.float32)))

    owner.begin_pass(1)
    wave = take(0, 2).waves[0]
    assert [(place.key, place.share) for place in wave.loads] == [(2, 0.4), (8, 0.6)]
    take(1, 0)  # its bottom takes the only slot for bottoms
    wave = take(0, 2).waves[0]
    assert [place.key for place in wave.resident] == [2] and [
        place.key for place in wave.loads
    ] == [8]
    totals = owner.counters.totals()
    assert (totals["requests"], totals["hits"], totals["misses"], totals["evictions"]) == (
        6,
        1,
        5,
        2,
    )
    assert totals["demand_bytes"] == 3 * 60 + 2 * 40
