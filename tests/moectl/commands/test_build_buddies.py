"""`moectl build-buddies` on a made-up profile, compared with the pure functions that it calls."""

import json

import numpy as np
import pyarrow as pa
import pytest

from artifacts.errors import BadUsage
from artifacts.routing.buddies import buddy_lists
from artifacts.routing.coactivation import Coactivation, conditional
from artifacts.routing.similarity import Similarity
from artifacts.shape import Shape
from artifacts.store.rows import buddy_matrices, similarity_rows
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from moectl.cli import main
from moectl.commands.build.build_buddies import parse_alphas

SHAPE = Shape(num_layers=3, num_experts=8, top_k=3, expert_nbytes=1000)


def routed_layer(seed):
    random = np.random.default_rng(seed)
    statistics = Coactivation(8)
    # Expert 7 is never selected.
    selected = np.argsort(random.random((60, 7)) * np.arange(1, 8), axis=1)[:, :3]
    statistics.update(selected, random.random((60, 3)))
    return statistics


def measured():
    """A similarity as a profile measures it: cosines are symmetric, losses are not."""
    random = np.random.default_rng(9)
    size = (SHAPE.num_layers, SHAPE.num_experts, SHAPE.num_experts)
    cosine = random.uniform(-0.5, 1, size)
    cosine = (cosine + cosine.transpose(0, 2, 1)) / 2
    loss = random.uniform(0.1, 3, size)
    diagonal = np.arange(SHAPE.num_experts)
    cosine[:, diagonal, diagonal] = 1
    loss[:, diagonal, diagonal] = 0
    return Similarity(cosine, loss, random.random(size[:2]), random.integers(0, 40, size[:2]))


MEASURED = measured()
LAYERS = [routed_layer(seed) for seed in range(SHAPE.num_layers)]


def profile_tables(*, has_similarity):
    pairs, weighted = (
        np.stack([getattr(layer, name) for layer in LAYERS]) for name in ("pairs", "weighted")
    )
    layer, i, j = np.nonzero(pairs)
    # each of a token's three experts is in two pairs
    use = np.stack([statistics.pairs.sum(axis=1) // 2 for statistics in LAYERS])
    at = np.indices(use.shape).reshape(2, -1)
    tables = {
        "activations": pa.table(
            {
                "phase": ["prefill"] * use.size,
                "layer": at[0],
                "expert": at[1],
                "count": use.ravel(),
                "weight": use.ravel() / 3,
            }
        ),
        "coactivations": pa.table(
            {
                "layer": layer,
                "i": i,
                "j": j,
                "count": pairs[layer, i, j],
                "weight": weighted[layer, i, j],
            }
        ),
        "entropy": pa.table(
            {
                "layer": range(3),
                "percentiles": [np.linspace(0, 1, 101, dtype=np.float32)] * 3,
                "histogram": [[1]] * 3,
            }
        ),
    }
    return tables | ({"similarity": similarity_rows(MEASURED)} if has_similarity else {})


def write_profile(path, *, name="toy", fingerprint="a" * 64, has_similarity=True):
    model = ModelInfo(name, fingerprint, "olmoe", SHAPE)
    with Store.open(path) as store:
        store.add_model(model)
        run = RunInfo(
            "profile",
            model.model_id,
            utc_now(),
            2.5,
            data="builtin",
            tokens=60,
            seed=4,
            versions={},
        )
        return store.write_run(run, profile_tables(has_similarity=has_similarity))


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "moe.duckdb"
    write_profile(path)
    return path


def built_buddies(path, run_id):
    with Store.open(path, read_only=True) as opened:
        return buddy_matrices(opened.read("buddies", run_id), SHAPE.num_layers, SHAPE.num_experts)[
            0
        ]


@pytest.mark.parametrize("metric", ["coactivation", "weighted"])
def test_lists_are_those_of_the_definition(store, capsys, metric):
    arguments = ["--alpha", "0.6", "--k-max", "4", "--metric", metric, "--json"]
    assert main(["build-buddies", "--store", str(store), *arguments]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["run"], said["profile_run"], said["metric"], said["k_max"]) == (2, 1, metric, 4)
    buddies = built_buddies(store, 2)
    for layer, statistics in enumerate(LAYERS):
        counts = statistics.pairs if metric == "coactivation" else statistics.weighted
        expected = buddy_lists(conditional(counts), 0.6, 4)
        assert [
            [buddy for buddy in row if buddy >= 0] for row in buddies[layer].tolist()
        ] == expected
        sizes = [len(names) for names in expected if names]
        row = said["layers"][layer]
        assert (row["min"], row["max"], row["never_active"]) == (min(sizes), max(sizes), 1)
        assert row["mean"] == pytest.approx(np.mean(sizes))
        assert 0.6 <= row["covered_q"] <= 1


@pytest.mark.parametrize("metric", ["coactivation", "weighted"])
def test_epsilon_is_added_to_every_count(store, metric):
    arguments = ["--alpha", "0.6", "--k-max", "7", "--metric", metric]
    assert main(["build-buddies", "--store", str(store), *arguments, "--epsilon", "30"]) == 0
    assert main(["build-buddies", "--store", str(store), *arguments]) == 0
    smooth = built_buddies(store, 2)
    plain = built_buddies(store, 3)
    for layer, statistics in enumerate(LAYERS):
        counts = (statistics.pairs if metric == "coactivation" else statistics.weighted) + 30.0
        counts[7] = 0  # never selected: it has no companions to smooth
        expected = buddy_lists(conditional(counts), 0.6, 7)
        assert [
            [buddy for buddy in row if buddy >= 0] for row in smooth[layer].tolist()
        ] == expected
    assert (smooth >= 0).sum() > (plain >= 0).sum(), "even shares take longer lists"
    with Store.open(store, read_only=True) as opened:
        assert [opened.run(run).info.parameters["epsilon"] for run in (2, 3)] == [30.0, 0.0]


@pytest.mark.parametrize("metric", ["output", "loss"])
def test_measured_lists_follow_what_was_measured(store, capsys, metric):
    arguments = ["--alpha", "1", "--k-max", "7", "--metric", metric, "--json"]
    assert main(["build-buddies", "--store", str(store), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["never_active"] == 0
    found = built_buddies(store, 2)
    price = -MEASURED.cosine if metric == "output" else MEASURED.loss.copy()
    price[:, np.arange(8), np.arange(8)] = np.inf
    assert found.tolist() == np.argsort(price, axis=2)[:, :, :7].tolist()


def test_a_profile_without_similarity_has_the_other_metrics(tmp_path, capsys):
    path = tmp_path / "moe.duckdb"
    write_profile(path, has_similarity=False)
    assert main(["build-buddies", "--store", str(path)]) == 5
    assert "was profiled without similarity, which the metric loss needs" in capsys.readouterr().err
    assert main(["build-buddies", "--store", str(path), "--metric", "weighted"]) == 0


def test_the_run_says_where_it_came_from(store):
    assert main(["build-buddies", "--store", str(store), "--alpha", "1:0.5"]) == 0
    with Store.open(store, read_only=True) as opened:
        info = opened.run(2).info
    parameters = {
        "profile_run": 1,
        "metric": "loss",
        "alpha": [0.95, 0.5, 0.95],
        "k_max": 16,
        "epsilon": 0.0,
    }
    assert info.parameters == parameters
    assert (info.command, info.data, info.tokens, info.seed) == ("build-buddies", "builtin", 60, 4)


def test_the_newest_profile_is_used_unless_one_is_named(store, capsys):
    write_profile(store, name="other", fingerprint="b" * 64)
    assert main(["build-buddies", "--store", str(store), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile_run"] == 2
    assert main(["build-buddies", "--store", str(store), "--run", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile_run"] == 1


def test_a_table_by_layer(store, capsys):
    assert main(["build-buddies", "--store", str(store)]) == 0
    out = capsys.readouterr().out
    assert "covered q" in out and "never active" in out
    assert len([line for line in out.splitlines() if line.startswith("│")]) == SHAPE.num_layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.9", [0.9] * 3),
        ("0.9, 0.8,1", [0.9, 0.8, 1.0]),
        ("0:0.5,2:0.7", [0.5, 0.95, 0.7]),
    ],
)
def test_alphas(text, expected):
    assert parse_alphas(text, 3) == expected


@pytest.mark.parametrize(
    "text", ["", "abc", "0", "1.1", "nan", "0.5,0.6", "3:0.5", "x:0.5", "0:0.5,0.6", "0:", "-1:0.5"]
)
def test_bad_alphas(text):
    with pytest.raises(BadUsage):
        parse_alphas(text, 3)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--metric", "coactivatoin"], 2, "did you mean coactivation?"),
        (["--alpha", "2"], 2, "at most 1"),
        (["--k-max", "0"], 2, "k-max"),
        (["--epsilon", "1"], 2, "smooths counts, which loss does not have"),
        (["--epsilon", "-1", "--metric", "weighted"], 2, "from 0 to 1,000,000, not -1"),
        (["--epsilon", "nan", "--metric", "weighted"], 2, "from 0 to 1,000,000, not nan"),
        (["--run", "9"], 3, "no run 9"),
    ],
)
def test_bad_options_write_nothing(store, capsys, arguments, code, message):
    before = store.read_bytes()
    assert main(["build-buddies", "--store", str(store), *arguments]) == code
    said = capsys.readouterr()
    assert message in said.err and not said.out
    assert store.read_bytes() == before


def test_a_store_without_a_profile_is_told_what_to_run(tmp_path, capsys):
    path = tmp_path / "moe.duckdb"
    assert main(["build-buddies", "--store", str(path)]) == 3
    assert "moectl profile" in capsys.readouterr().err
    assert not path.exists()
    with Store.open(path) as store:
        store.write_run(RunInfo("bench", None, utc_now(), 0.0, versions={}), {})
    assert main(["build-buddies", "--store", str(path)]) == 5
    assert (
        "holds no profile to build from; run moectl profile MODEL first" in capsys.readouterr().err
    )
    assert main(["build-buddies", "--store", str(path), "--run", "1"]) == 2
    assert "run 1 is a bench, not a profile" in capsys.readouterr().err
