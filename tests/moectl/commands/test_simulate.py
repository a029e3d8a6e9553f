"""`moectl simulate`: counters against the slow reference, and every kind of error."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from artifacts.shape import Shape
from artifacts.traces.parquet import read_parquet, write_parquet
from artifacts.traces.trace import Trace
from moectl.cli import main
from moectl.shared.trace_source import TraceSource, open_source
from runtime.policies.prefetch.draft import UNTOLD
from runtime.replay.drafting import Drafts, verified
from tests import TRACE
from tests.runtime.control.reference import SlowCache

pytestmark = pytest.mark.slow

SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=1)
REFERRED = ("lru", "lfu", "lcp", "least_stale", "fld")
COUNTS = ("requests", "hits", "late", "misses", "collisions", "evictions")

Simulated = Callable[..., dict]


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third of the trace's requests."""
    whole = read_parquet(TRACE)
    path = tmp_path_factory.mktemp("some") / "trace.parquet"
    write_parquet(whole.take(np.flatnonzero(whole.request < 2)), path)
    return path


@pytest.fixture
def simulated(capfd: pytest.CaptureFixture[str]) -> Simulated:
    """`simulated(*options)`: the JSON of the command."""

    def run(*options: object) -> dict:
        capfd.readouterr()
        code = main(["simulate", *map(str, options), "--json"])
        said = capfd.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)

    return run


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("eviction", REFERRED)
def test_counters_equal_the_slow_reference(
    simulated: Simulated, some: Path, eviction: str, scope: str
) -> None:
    options = ("--num-experts", 32, "--eviction", eviction, "--scope", scope, "--budget", "48x")
    said = simulated("--trace", some, *options)
    slow = SlowCache(SHAPE, 48, scope == "global", eviction)
    for _, steps in groupby(read_parquet(some).steps(), key=lambda step: step.pass_index):
        for number, step in enumerate(steps):
            if not number:
                slow.begin_pass(len(step.experts))
            slow.step(step.layer, step.experts)
    assert {name: said["counters"][name] for name in slow.counts} == slow.counts
    assert said["counters"]["late"] == 0
    assert len(said["by_layer"]) == SHAPE.num_layers
    for name in COUNTS:
        assert sum(layer[name] for layer in said["by_layer"]) == said["counters"][name]


def test_what_json_says(simulated: Simulated, some: Path) -> None:
    said = simulated("--trace", some, "--eviction", "lcp", "--budget", "25%")
    assert [row["policies"] for row in said["rows"]] == [
        "on-demand + lcp",
        "on-demand",
        "belady",
        "oracle",
    ]
    asked, plain, belady, oracle = said["rows"]
    assert asked["misses"] == said["counters"]["misses"]
    assert plain["hit_rate"] < asked["hit_rate"] < belady["hit_rate"]
    assert oracle["tpot_ms"] < belady["tpot_ms"] < plain["tpot_ms"]
    assert said["tokens_per_s"] == pytest.approx(1000 / said["tpot_ms"])
    assert said["counters"]["exposed_ms"] == said["exposed_ms"] == asked["exposed_ms"] > 0
    receipt = said["receipt"]
    assert receipt["policies"]["eviction"] == "lcp" and receipt["machine"] == "a100-pcie4"
    assert (receipt["slots"], receipt["scope"], receipt["experts_per_layer"]) == (64, "layer", 32)
    assert any("experts of 12 MiB" in line for line in receipt["assumed"])


def test_many_clients_share_what_is_loaded(simulated: Simulated, some: Path) -> None:
    """With all clients busy, a pass of three wants more distinct experts than one, and fewer for
    each token."""
    options = ("--trace", some, "--num-experts", 32, "--eviction", "fld")
    plain, one, three = (
        simulated(*options, *more)
        for more in ((), ("--clients", 1), ("--clients", 3, "--chunk", 8))
    )
    assert plain["counters"] == one["counters"] and plain["receipt"]["clients"] is None
    assert three["receipt"]["clients"] == {"count": 3, "chunk": 8, "seed": 0}
    rows = [said["rows"][0] for said in (one, three)]
    assert (
        rows[0]["experts_per_step"] < rows[1]["experts_per_step"] < 3 * rows[0]["experts_per_step"]
    )
    assert rows[1]["bytes_per_token"] < rows[0]["bytes_per_token"]
    assert all(
        row["tpot_ms"] <= row["tpot_p95_ms"] and row["ttft_ms"] <= row["ttft_p95_ms"]
        for row in rows
    )
    assert any("requests are repeated" in note for note in three["receipt"]["assumed"])


def test_drafts_are_replayed_for_every_setting(simulated: Simulated, some: Path) -> None:
    options = ("--trace", some, "--num-experts", 32, "--compare", "lru,class_lru")
    said = simulated(*options, "--drafts", "0-1", "--acceptance", ".8,.5", "--draft-ms", 1)
    assert list(said) == ["lru", "class_lru"]
    for choice in said.values():
        plain, one = choice["rows"]
        assert one["tokens_per_pass"] == pytest.approx(1.8, abs=0.1)
        assert one["experts_per_layer"] > plain["experts_per_layer"]
        assert choice["length"] in (0, 1) and "rejected draft" in choice["assumed"][-1]


def test_a_trace_with_drafts_tells_their_acceptance(
    simulated: Simulated, some: Path, tmp_path: Path
) -> None:
    """Its prefetch policy is told nothing by these drafts, and says so."""
    path = tmp_path / "drafted.parquet"
    trace = replace(read_parquet(some), iteration=None, embeddings=None)
    write_parquet(verified(trace, 2, Drafts((0.6,))), path)
    said = simulated("--trace", path, "--num-experts", 32, "--prefetch", "draft")
    counted = said["counters"]
    for row in said["rows"]:
        assert row["acceptance"] == counted["accepted"] / counted["drafted"]
        assert row["acceptance"] == pytest.approx((0.6 + 0.36) / 2, abs=0.05)
        assert row["tokens_per_pass"] == pytest.approx(1.96, abs=0.2)
    assert UNTOLD in said["receipt"]["assumed"]


def test_the_same_twice(simulated: Simulated, some: Path) -> None:
    options = ("--trace", some, "--preset", "specmd", "--budget", "96x")
    assert simulated(*options) == simulated(*options)


def test_what_is_not_protected_collides(simulated: Simulated, some: Path) -> None:
    options = (
        "--trace",
        some,
        "--prefetch",
        "score",
        "--scope",
        "global",
        "--budget",
        "20%",
        "--window",
        "96MiB",
    )
    collisions = {}
    for serving in ("pinned", "one_by_one"):
        said = simulated(*options, "--eviction", "score", "--serving", serving)
        assert said["receipt"]["serving"] == serving
        collisions[serving] = said["counters"]["collisions"]
    assert collisions["one_by_one"] > collisions["pinned"]


def test_several_are_compared(
    simulated: Simulated, some: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--trace", some, "--compare", "lru,lcp:rho=0.5,omega=64,near,buddymoe")
    said = simulated(*options)
    assert [row["policies"] for row in said["rows"][:4]] == [
        "lru",
        "lcp:rho=0.5,omega=64",
        "near",
        "buddymoe",
    ]
    assert said["rows"][0]["misses"] == said["rows"][4]["misses"]
    assert any(
        "buddy lists are counted in the trace" in line for line in said["receipt"]["assumed"]
    )
    assert main(["simulate", *map(str, options)]) == 0
    table = capfd.readouterr().out
    assert all(
        name in table
        for name in ("lcp:rho=0.5,omega=64", "on-demand", "belady", "oracle", "tokens/s")
    )


@pytest.mark.parametrize(
    ("names", "prefetches"),
    [
        ("lru,horizon", False),
        ("horizon,lcp:rho=0.5,omega=64", False),
        ("horizon", True),
        ("specmd,horizon", True),
    ],
)
def test_a_name_beside_evictions_is_an_eviction(
    simulated: Simulated, some: Path, names: str, prefetches: bool
) -> None:
    """`horizon` is a preset too, which prefetches."""
    rows = simulated("--trace", some, "--num-experts", 32, "--compare", names)["rows"]
    row = next(row for row in rows if row["policies"] == "horizon")
    assert (row["prefetched"] > 0) == prefetches


def test_evictions_are_compared_on_a_trace_without_predictions(
    simulated: Simulated, tmp_path: Path
) -> None:
    trace = read_parquet(TRACE)
    write_parquet(
        replace(trace, predicted=None, learned=None), path := tmp_path / "unpredicted.parquet"
    )
    said = simulated(
        "--trace", path, "--num-experts", 32, "--compare", "lru,lcp,horizon", "--scope", "global"
    )
    hits = {row["policies"]: row["hit_rate"] for row in said["rows"]}
    assert max(hits["lru"], hits["lcp"]) < hits["horizon"] < hits["belady"]


def test_the_bundled_trace_needs_no_file_and_no_model(
    some: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = open_source(TraceSource(Path("gpt-oss-20b")))
    shape = opened.model.shape
    assert (opened.name, opened.model.name, shape.num_layers, shape.num_experts) == (
        "gpt-oss-20b",
    ) * 2 + (24, 32)
    assert len(opened.trace) == 24 * 2556 and opened.trace.assumed == ()
    (tmp_path / "gpt-oss-20b").symlink_to(some)
    assert (
        open_source(TraceSource(Path("gpt-oss-20b"), num_experts=32)).trace.num_layers
        == SHAPE.num_layers
    )


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ((), ["on-demand", "belady", "oracle"]),
        (("--compare", "lcp,on-demand,belady"), ["lcp", "on-demand", "belady", "oracle"]),
        (("--preset", "on-demand", "--scope", "global"), ["on-demand", "belady", "oracle"]),
    ],
)
def test_what_always_stands_there_stands_there_once(
    simulated: Simulated, some: Path, options: tuple[str, ...], rows: list[str]
) -> None:
    assert [row["policies"] for row in simulated("--trace", some, *options)["rows"]] == rows


def test_a_faster_link_stalls_less_and_decides_the_same(simulated: Simulated, some: Path) -> None:
    slow, fast = (
        simulated("--trace", some, "--machine", name) for name in ("5gbps", "a6000-pcie4")
    )
    assert slow["by_layer"] == fast["by_layer"]
    assert slow["exposed_ms"] > 4 * fast["exposed_ms"]


def test_a_wider_window_brings_more(simulated: Simulated, some: Path) -> None:
    options = ("--trace", some, "--prefetch", "next_gate", "--model", "bundled")
    narrow, wide = (simulated(*options, "--window", window) for window in ("1B", "1GiB"))
    assert narrow["counters"]["prefetches"] < wide["counters"]["prefetches"]
    assert narrow["counters"]["late"] > wide["counters"]["late"]
    assert simulated(*options)["receipt"]["prefetch_window_bytes"] > 0


def test_a_model_gives_its_own_sizes(simulated: Simulated, some: Path) -> None:
    said = simulated("--trace", some, "--model", "bundled", "--budget", "2MiB")
    receipt = said["receipt"]
    assert receipt["assumed"] == []
    assert receipt["slots"] == 2 * 2**20 // receipt["expert_bytes"]


def test_a_trace_of_the_store(
    simulated: Simulated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "moe.duckdb"
    options = (
        "--tokens",
        "512",
        "--length",
        "64",
        "--prefill",
        "16",
        "--no-similarity",
        "--store",
        str(store),
    )
    assert main(["profile", *options]) == 0
    assert main(["simulate", "--store", str(store)]) == 5
    assert "holds no trace" in capfd.readouterr().err
    assert main(["profile", *options, "--trace"]) == 0
    newest = simulated("--store", store)
    second = simulated("--store", store, "--run", 2)
    assert newest == second
    assert newest["receipt"]["assumed"] == [] and newest["receipt"]["experts_per_layer"] == 32
    assert newest["ttft_ms"] > newest["tpot_ms"]


def test_batches_and_waves(simulated: Simulated) -> None:
    """Prompts of 40 tokens need more experts than there are slots."""
    dials = "tokens=400,requests=8,prompt=40,batch=4"
    said = simulated(
        "--synthetic", dials, "--num-experts", 16, "--budget", "48x", "--eviction", "least_stale"
    )
    single = simulated(
        "--synthetic", dials.replace("batch=4", "batch=1"), "--num-experts", 16, "--budget", "48x"
    )
    assert said["receipt"]["slots"] == 48 < said["counters"]["evictions"]
    assert said["counters"]["requests"] < single["counters"]["requests"]
    assert said["tokens_per_s"] == pytest.approx(4000 / said["tpot_ms"])


def test_a_synthetic_trace_of_a_named_shape(simulated: Simulated) -> None:
    said = simulated(
        "--synthetic", "tokens=80,requests=2,prompt=8,seed=3", "--model", "mixtral-8x7b"
    )
    assert (said["receipt"]["layers"], said["receipt"]["expert_bytes"]) == (
        32,
        3 * 4096 * 14336 * 2,
    )
    assert "seed=3" in said["receipt"]["trace"]


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Path]:
    """Traces that each lack something, and a file that is cut off."""
    whole = read_parquet(TRACE)
    short = whole.take(np.flatnonzero(whole.request < 1))
    lacking = {
        "plain": replace(short, probabilities=None, predicted=None, learned=None),
        "unpredicted": replace(short, predicted=None, learned=None),
        "seven": short.take(np.flatnonzero(short.layer < 7)),
    }
    for name, trace in lacking.items():
        assert isinstance(trace, Trace)
        write_parquet(trace, tmp_path / f"{name}.parquet")
    (tmp_path / "broken.parquet").write_bytes(TRACE.read_bytes()[:2000])
    return {name: tmp_path / f"{name}.parquet" for name in (*lacking, "broken")}


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "give --trace FILE, --run ID or --synthetic SPEC; there is no store"),
        (("--trace", "none.parquet"), 3, "there is no trace file none.parquet"),
        (("--trace", "{broken}"), 3, "cannot be read as Parquet"),
        (("--trace", TRACE, "--num-experts", "16"), 3, "but a layer has only 16 experts (0 to 15)"),
        (("--trace", TRACE, "--num-experts", "3"), 3, "but a layer has only 3 experts"),
        (("--trace", TRACE, "--num-experts", "0"), 2, "a layer has at least one expert"),
        (("--trace", "{plain}"), 2, "give --num-experts or --model"),
        (("--trace", TRACE, "--model", "mixtral-8x7b"), 3, "but a layer has only 8 experts"),
        (("--trace", TRACE, "--model", "olmoe-1b-7b"), 3, "it is another model's"),
        (
            ("--trace", "{seven}", "--model", "bundled"),
            3,
            "the trace has 7 layers and 4 experts per token",
        ),
        (
            ("--trace", TRACE, "--model", "bundled", "--num-experts", "64"),
            2,
            "bundled has 32 experts a layer, not 64",
        ),
        (
            ("--trace", TRACE, "--model", "olmo"),
            2,
            "unknown model 'olmo'; did you mean olmoe-1b-7b?",
        ),
        (
            ("--trace", TRACE, "--machine", "a10-pcie4"),
            2,
            "unknown machine 'a10-pcie4'; did you mean a100-pcie4?",
        ),
        (
            ("--trace", TRACE, "--eviction", "mru"),
            2,
            "unknown eviction policy 'mru'; did you mean lru?",
        ),
        (("--trace", TRACE, "--eviction", "lcp:rho=2"), 2, "lcp needs 0 < rho <= 1"),
        (
            ("--trace", "{unpredicted}", "--preset", "promoe"),
            3,
            "needs what fitted predictors say 1 layers ahead",
        ),
        (
            ("--trace", TRACE, "--preset", "on-demnd"),
            2,
            "unknown preset 'on-demnd'; did you mean on-demand?",
        ),
        (("--trace", TRACE, "--compare", "lru,,lcp"), 2, "unknown eviction policy ''"),
        (("--trace", TRACE, "--compare", "lru,nera"), 2, "unknown eviction policy 'nera'"),
        (("--trace", TRACE, "--scope", "planet"), 2, "scope is layer or global"),
        (
            ("--trace", TRACE, "--serving", "freely"),
            2,
            "--serving is pinned, unprotected, one_by_one, not 'freely'",
        ),
        (
            ("--trace", TRACE, "--serving", "one_by_one", "--miss", "near"),
            2,
            "leave out --miss near",
        ),
        (
            ("--trace", TRACE, "--budget", "7x"),
            2,
            "one expert a layer is the least: give at least 8x",
        ),
        (("--trace", TRACE, "--budget", "-1x"), 2, "is not understood"),
        (("--trace", TRACE, "--window", "wide"), 2, "size 'wide' is not understood"),
        (
            ("--trace", "{unpredicted}", "--prefetch", "next_gate"),
            3,
            "needs predictions 1 layers ahead",
        ),
        (
            ("--trace", TRACE, "--prefetch", "next_gate:distance=4"),
            3,
            "needs predictions 4 layers ahead",
        ),
        (
            ("--trace", "{plain}", "--num-experts", "32", "--eviction", "score"),
            3,
            "needs the routers' probabilities",
        ),
        (
            ("--trace", TRACE, "--synthetic", "skew=1"),
            2,
            "give one of --trace FILE, --run ID and --synthetic SPEC",
        ),
        (("--synthetic", "skew=1", "--clients", "0"), 2, "--clients 0: give 1 to 10,000"),
        (("--synthetic", "skew=1", "--chunk", "8"), 2, "give --clients too"),
        (("--trace", TRACE, "--drafts", "0-x"), 2, "write a number, or a range as 0-8"),
        (("--trace", TRACE, "--drafts", "2", "--clients", "2"), 2, "leave out --clients"),
        (("--trace", TRACE, "--drafts", "2", "--acceptance", "high"), 2, "draft by draft"),
        (("--synthetic", "skw=1"), 2, "unknown dial 'skw'; did you mean skew?"),
        (("--synthetic", "skew=much"), 2, "skew takes a value of type float, not 'much'"),
        (("--synthetic", "locality=1.5"), 2, "locality is a chance between 0 and 1"),
        (("--synthetic", "tokens=100"), 2, "leave nothing to decode after prompts of 32"),
        (("--synthetic", "tokens=nan"), 2, "tokens takes a value of type int"),
        (("--run", "1"), 3, "moe.duckdb"),
    ],
)
def test_what_cannot_be_simulated(
    options: tuple,
    code: int,
    says: str,
    parts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *(str(option).format(**parts) for option in options)]) == code
    said = capfd.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.startswith("moectl: ") and said.err.count("\n") == 1, said.err


@pytest.mark.parametrize("options", [("--eviction", "belady"), ("--prefetch", "oracle")])
def test_the_future_is_not_for_live_runs(
    options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--prompt", "hello", "--max-new-tokens", "2", *options]) == 5
    assert "it runs in the simulator only" in capfd.readouterr().err


def test_fmoe_takes_the_maps_of_the_store_or_begins_with_none(
    simulated: Simulated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = read_parquet(TRACE)
    write_parquet(trace.take(trace.token < 32), few := tmp_path / "few.parquet")
    store = tmp_path / "moe.duckdb"
    fmoe = ("--trace", few, "--num-experts", 32, "--preset", "fmoe", "--store", store)
    alone = simulated(*fmoe)
    assert (
        "expert maps: none at first, each iteration joins them once it is over"
        in alone["receipt"]["assumed"]
    )
    assert (
        main(
            ["build-maps", "--tokens", "1024", "--capacity", "200", "--store", str(store), "--json"]
        )
        == 0
    )
    mapped = simulated(*fmoe)
    assert "expert maps: those of run 1 of the store" in mapped["receipt"]["assumed"]
    rows = {row["policies"]: row["hit_rate"] for row in mapped["rows"]}
    assert rows["on-demand"] < rows["fmoe"] < rows["oracle"]
    write_parquet(replace(trace, iteration=None, embeddings=None), old := tmp_path / "old.parquet")
    assert main(["simulate", "--trace", str(old), "--num-experts", "32", "--preset", "fmoe"]) == 3
    assert (
        "what each pass was given, which the trace does not hold: record one with"
        in capfd.readouterr().err
    )
