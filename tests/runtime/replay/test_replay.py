"""A live run and a replay of its recorded trace agree on every counter of every pass and layer."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from artifacts.quantisation.replicas import Replicas
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import Predictors
from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet, write_parquet
from artifacts.traces.trace import DECODE, PREFILL, Trace
from runtime.control.build import build_controller
from runtime.control.controller import Controller
from runtime.control.counters import Counter
from runtime.drafters import greedy
from runtime.model.open import MoeModel, open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.prefetch.draft import UNTOLD
from runtime.policies.presets import presets
from runtime.policies.shared.maps import Match, Matching
from runtime.replay.replay import replay
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY
from tools.gpu.checks.made_replicas import made


def artefacts(shape: Shape, replicas: Replicas | None = None) -> Artefacts:
    rng = np.random.default_rng(0)
    size = (shape.num_layers, shape.num_experts)
    buddies = np.stack(
        [[rng.permutation(shape.num_experts)[:3] for _ in range(size[1])] for _ in range(size[0])]
    )
    q = rng.random((*size, 3))
    return Artefacts(
        buddies=buddies,
        buddy_q=q,
        coactivated=(buddies[:, ::-1], q),
        entropy=np.zeros((size[0], 101)),
        replicas=replicas,
        predictors=random_predictors(shape),
        maps=random_maps(shape),
        learns_maps=True,
    )


HIDDEN = 32  # of the checkpoints


def random_maps(shape: Shape) -> ExpertMaps:
    """Return a store for ten maps with seven in it: a run that learns fills it and goes on."""
    rng = np.random.default_rng(1)
    maps = ExpertMaps(
        10, num_layers=shape.num_layers, num_experts=shape.num_experts, hidden=HIDDEN, distance=1
    )
    maps.add(
        rng.normal(size=(7, HIDDEN)),
        rng.dirichlet(np.ones(shape.num_experts), (7, shape.num_layers)),
    )
    return maps


def random_predictors(shape: Shape, distance: int = 2) -> Predictors:
    rng = np.random.default_rng(2)
    scale = np.ones(shape.num_layers, np.float32)
    weights = rng.normal(size=(shape.num_layers, distance, HIDDEN + 4 + 1, shape.num_experts))
    return Predictors(scale, weights.astype(np.float32), num_features=4, seed=0)


def live_and_replayed(
    opened: MoeModel, settings: Settings, known: Artefacts, path: Path
) -> tuple[Controller, Controller]:
    """Run a prompt, tokens after it, a padded batch of prompts, a token of each answer, and a pass
    in which one request has ended and another is read beside the others; then replay the trace,
    through Parquet at `path` and back."""
    mask = torch.ones(3, 7, dtype=torch.int64)
    mixed = torch.ones(3, 4, dtype=torch.int64)
    mask[1, :3] = mixed[:2, :3] = 0
    with Session(opened, settings, artefacts=known) as session:
        recorder = session.record()
        list(session.tokens(torch.arange(3, 10)[None], Sampling(8, ignore_eos=True)))
        session.new_requests(3)
        session.forward(torch.randint(3, VOCABULARY, mask.shape), mask=mask)
        session.forward(torch.randint(3, VOCABULARY, (3, 1)))
        session.watcher.first_request += 1
        session.forward(torch.randint(3, VOCABULARY, mixed.shape), mask=mixed)
        session.validate()
    return session.controller, replayed(session, recorder.trace(), settings, known, path)


def replayed(
    session: Session, trace: Trace, settings: Settings, known: Artefacts, path: Path
) -> Controller:
    """Replay what a session recorded, as `live_and_replayed` does."""
    write_parquet(trace, path)
    again = build_controller(
        build(settings.texts()).with_ratio(lambda: session.parts.policies.miss.ratio),
        session.opened.shape,
        num_slots=session.parts.fast.num_slots,
        shadows=session.parts.fast.shadows,
        split=session.parts.fast.split,
        scope=session.parts.scope,
        window=session.parts.window,
        artefacts=known,
        num_devices=settings.devices,
    )
    replay(read_parquet(path, num_experts=session.opened.shape.num_experts), again)
    return again


RUNNING = [name for name, preset in presets().items() if not preset.waits_for]
LIVE = [name for name in RUNNING if not build(presets()[name].texts()).requires & {"next_use"}]


@pytest.fixture(scope="module")
def replicas(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Replicas:
    return made(open_model(str(checkpoint("olmoe"))), tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("preset", LIVE)
@pytest.mark.parametrize(
    "policies",
    [
        {},
        {
            "prefetch": "next_gate:distance=2,overfetch=1.5,through=yes",
            "miss": "buddy:eta=1,quota=0.4,temperature=0.8",
        },
        {"prefetch": "learned:distance=2", "routing": "standard", "miss": "near:ratio=0.5"},
        {"prefetch": "frequency:distance=2", "routing": "cache_aware", "miss": "random_resident"},
    ],
)
def test_live_equals_replay(
    checkpoint: Checkpoint,
    replicas: Replicas,
    tmp_path: Path,
    preset: str,
    policies: dict[str, str],
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    known = artefacts(opened.shape, replicas)
    if preset in ("shadow", "uniform-bits"):
        policies = {axis: text for axis, text in policies.items() if axis != "miss"}
    settings = Settings(preset=preset, policies=policies, budget="50%", window="5KiB", link="1GB/s")
    live, again = live_and_replayed(opened, settings, known, tmp_path / "trace.parquet")
    trace = read_parquet(tmp_path / "trace.parquet")
    assert set(trace.phase[trace.pass_ == trace.pass_.max()]) == {PREFILL, DECODE}
    assert len(live.counters.passes) == 11
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert np.array_equal(live.cache.state, again.cache.state)
    if preset != "full":
        assert live.counters.totals()["misses"] > 0


@pytest.mark.parametrize(
    ("preset", "policies"),
    [
        ("moe-infinity", {"miss": "qstar:ratio=0.5,tokens=2"}),
        ("behind", {"prefetch": "frequency", "miss": "behind:ratio=0.2,margin=1,tokens=2"}),
        ("horizon", {"prefetch": "blend:maps=yes"}),
        ("fmoe", {"prefetch": "affinity:distance=2"}),
        ("context-aware", {"prefetch": "frequency:distance=2"}),
    ],
)
def test_requests_that_share_passes_equal_their_replay(
    checkpoint: Checkpoint,
    replicas: Replicas,
    tmp_path: Path,
    preset: str,
    policies: dict[str, str],
) -> None:
    """Five requests of different lengths, three at a time, whose prompts are read six tokens a
    pass."""
    opened = open_model(str(checkpoint("olmoe")))
    known = artefacts(opened.shape, replicas)
    settings = Settings(preset=preset, policies=policies, budget="50%", window="5KiB", link="1GB/s")
    with Session(opened, settings, artefacts=known) as session:
        recorder = session.record()
        with RequestBatch(session, rows=3, tile=6) as batch:
            for length in (4, 9, 2, 7, 1):
                batch.add(
                    torch.randint(3, VOCABULARY, (1, length)),
                    Sampling(2 + length % 3, ignore_eos=True),
                )
            while not batch.is_idle:
                batch.step()
        session.validate()
    trace = recorder.trace()
    live = session.controller
    again = replayed(session, trace, settings, known, tmp_path / "trace.parquet")
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert np.array_equal(live.cache.state, again.cache.state)
    assert any(
        len({*step.request.tolist()}) == 3 and step.phase == PREFILL for step in trace.steps()
    )


@pytest.mark.parametrize(
    ("preset", "draft", "policies"),
    [
        ("on-demand", "ngram=1:3", {}),
        ("horizon", "resident:3", {}),
        ("near", "resident:3", {}),
        ("buddymoe", "ngram=1:3", {"eviction": "class_lru"}),
        ("mixtral-offloading", "resident:4", {}),
        ("on-demand", "resident:4", {"prefetch": "draft"}),
        ("horizon", "resident:3", {"prefetch": "draft:ahead=1"}),
        ("specmd", "ngram=1:3", {"prefetch": "draft"}),
        ("specmd", "ngram=1:4", {}),
        ("fmoe", "resident:2", {}),
        ("moe-infinity", "ngram=1:2", {"prefetch": "learned:distance=2"}),
        ("shadow", "resident:3", {}),
    ],
)
def test_drafted_requests_equal_their_replay(
    checkpoint: Checkpoint,
    replicas: Replicas,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    draft: str,
    policies: dict[str, str],
) -> None:
    """Two answers with drafts, of which some are rejected and some are read again; through
    Parquet."""
    monkeypatch.setattr(greedy, "SURE", 0.0)  # of which random weights give none
    opened = open_model(str(checkpoint("olmoe")))
    known = artefacts(opened.shape, replicas)
    settings = Settings(
        preset, policies, budget="50%", window="5KiB", link="1GB/s", threads=1, draft=draft
    )
    with Session(opened, settings, artefacts=known) as session:
        recorder = session.record()
        for length in (6, 9):
            list(session.tokens(torch.arange(3, 3 + length)[None], Sampling(14, ignore_eos=True)))
        session.validate()
        is_untold = UNTOLD in session.receipt()["fallbacks"]
    live = session.controller
    trace = recorder.trace()
    assert is_untold == (policies.get("prefetch") == "draft" and draft.startswith("ngram"))
    assert (trace.foretold is not None) == draft.startswith("resident")
    again = replayed(session, trace, settings, known, tmp_path / "trace.parquet")
    told = [
        [np.delete(one, Counter.TIES, 0) for one in each.counters.passes] for each in (live, again)
    ]  # without ties, which the draws tell, and not the routers
    assert np.array_equal(*told)
    assert np.array_equal(live.cache.state, again.cache.state)
    assert live.now == again.now
    assert live.counters.totals()["accepted"] > 0 and trace.rejected.any()


@pytest.mark.parametrize("near", [None, "4GB/s"])
def test_live_equals_replay_where_misses_are_brought_behind(
    checkpoint: Checkpoint, tmp_path: Path, near: str | None
) -> None:
    """The replay takes the ratio that the session measured, or was told by both rates."""
    opened = open_model(str(checkpoint("olmoe")))
    settings = Settings("behind", budget="25%", window="3KiB", link="100MB/s", near=near)
    known = artefacts(opened.shape)
    live, again = live_and_replayed(opened, settings, known, tmp_path / "trace.parquet")
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert np.array_equal(live.cache.state, again.cache.state)
    totals = live.counters.totals()
    assert near is None or totals["near"] > 0 and totals["prefetches"] > 0
    assert totals["requests"] == totals["hits"] + totals["late"] + totals["misses"]


def test_a_trace_of_another_model_is_refused(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    with Session(opened, Settings(preset="full")) as session:
        recorder = session.record()
        session.forward(torch.arange(3, 9)[None])
    shape = Shape(1, opened.shape.num_experts, opened.shape.top_k, 1)
    policies = build(Settings().texts())
    window = {"num_slots": 1, "scope": session.parts.scope, "window": 1, "artefacts": Artefacts()}
    with pytest.raises(BadInput, match="another model"):
        replay(recorder.trace(), build_controller(policies, shape, **window))


def test_what_a_pass_was_given_is_recorded(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Embeddings are means over each request's own tokens without padding; a replay's steps carry
    them."""
    opened = open_model(str(checkpoint("olmoe")))
    ids = torch.randint(3, VOCABULARY, (2, 5))
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[0, :3] = 0
    with Session(opened, Settings(budget="50%")) as session:
        recorder = session.record()
        session.new_requests(2)
        session.forward(ids, mask=mask)
        table = opened.model.get_input_embeddings().weight.detach()
    write_parquet(recorder.trace(), tmp_path / "trace.parquet")
    trace = read_parquet(tmp_path / "trace.parquet", num_experts=opened.shape.num_experts)
    own = torch.stack([table[ids[0, 3:]].mean(dim=0), table[ids[1]].mean(dim=0)]).numpy()
    assert trace.embeddings == pytest.approx(own, rel=1e-5, abs=1e-6)
    assert trace.iteration.tolist() == [0, 0, 1, 1, 1, 1, 1] * opened.shape.num_layers


@pytest.mark.parametrize(
    ("prefetch", "eviction"),
    [
        ("map:distance=1", "map"),
        ("map:distance=1,lag=1", "map:lag=1"),
        ("blend:distance=1,learned=no,maps=yes", "map:distance=2"),
    ],
)
def test_a_slow_search_of_maps_decides_the_same(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefetch: str,
    eviction: str,
) -> None:
    """A live run learns with a slow thread; the replay, through Parquet, searches at once."""
    opened = open_model(str(checkpoint("olmoe")))
    maps = {"prefetch": prefetch, "eviction": eviction}
    settings = Settings(
        preset="fmoe", policies=maps, budget="50%", window="5KiB", link="1GB/s", learn=True
    )
    known = artefacts(opened.shape)
    search = Matching._best
    pauses = np.random.default_rng(3)
    threads = set()

    def slowly(*arguments: object) -> Match:
        threads.add(threading.current_thread().name)
        time.sleep(pauses.uniform(0, 0.02))
        return search(*arguments)

    with monkeypatch.context() as patched, Session(opened, settings, artefacts=known) as session:
        patched.setattr(Matching, "_best", slowly)
        recorder = session.record()
        list(session.tokens(torch.arange(3, 10)[None], Sampling(6, ignore_eos=True)))
        learned = session.parts.policies.matching.learned()
        live = session.controller
    assert "matching" in threads and learned.num_iterations == 6
    write_parquet(recorder.trace(), tmp_path / "trace.parquet")
    policies = build(settings.texts())
    where = {
        "num_slots": session.parts.fast.num_slots,
        "scope": session.parts.scope,
        "window": 5 * 1024,
    }
    again = build_controller(policies, opened.shape, **where, artefacts=known)
    replay(read_parquet(tmp_path / "trace.parquet", num_experts=opened.shape.num_experts), again)
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert np.array_equal(live.cache.state, again.cache.state)
    assert np.array_equal(
        policies.matching.learned().maps.probabilities, learned.maps.probabilities
    )
    assert again.counters.totals()["prefetches"] > 0


@pytest.mark.parametrize("preset", ["horizon", "foresight"])
def test_live_equals_replay_where_a_token_is_computed_in_compiled_code(
    checkpoint: Checkpoint, tmp_path: Path, preset: str
) -> None:
    """Their policies read the inputs of layers, which compiled norms and attention then give."""
    opened = open_model(str(checkpoint("olmoe")))
    known = artefacts(opened.shape)
    settings = Settings(preset=preset, budget="50%", window="5KiB", link="1GB/s", experts=FUSED)
    live, again = live_and_replayed(opened, settings, known, tmp_path / "trace.parquet")
    assert np.array_equal(live.counters.passes, again.counters.passes)
    assert np.array_equal(live.cache.state, again.cache.state)
    assert live.counters.totals()["misses"] > 0
