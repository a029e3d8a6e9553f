"""`moectl inspect`: every name, as a table, as JSON and as a heatmap."""

import json
import re
from xml.etree import ElementTree

import pytest

from moectl.cli import main
from runtime.policies.presets import presets
from tests.moectl.commands.test_build_buddies import LAYERS, SHAPE, write_profile

SVG = "{http://www.w3.org/2000/svg}"
ARTEFACTS = ("activations", "coactivation", "entropy", "similarity", "buddies")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "moe.duckdb"
    write_profile(path)
    assert (
        main(["build-buddies", "--store", str(path), "--alpha", "0.7", "--metric", "weighted"]) == 0
    )
    return path


@pytest.fixture
def inspect(store, capsys):
    """Run `moectl inspect` with these arguments and return what it printed."""

    def run(*arguments):
        assert main(["inspect", *arguments, "--store", str(store)]) == 0
        said = capsys.readouterr()
        assert not said.err
        return said.out

    return run


def test_the_store_lists_models_runs_and_sizes(inspect):
    said = json.loads(inspect("--json"))
    assert said["models"][0]["model"] == "toy"
    assert [run["command"] for run in said["runs"]] == ["profile", "build-buddies"]
    assert {row["artefact"]: row["rows"] for row in said["artefacts"]}["activations"] == 24
    assert said["nbytes"] > 0
    table = inspect()
    assert "toy" in table and "build-buddies" in table and "KiB" in table and "on disk" in table


@pytest.mark.parametrize("name", [*ARTEFACTS, "runs", "presets", "policies", "machines"])
def test_every_name_is_a_table_and_one_json_object(inspect, name):
    assert inspect(name).count("\n") > 3
    said = json.loads(inspect(name, "--json"))
    assert said["name"] == name
    assert said.get("rows") or said["runs"]


@pytest.mark.parametrize("name", ARTEFACTS)
@pytest.mark.parametrize("layer", [[], ["--layer", "1"]])
def test_every_artefact_has_a_heatmap(inspect, name, layer):
    lines = inspect(name, "--heatmap", *layer).splitlines()
    matrix = json.loads(inspect(name, "--json", *layer))["matrix"]
    assert len(lines) == len(matrix) + 2  # title and legend
    # 1 digit and a space, then a character per column; off a terminal nothing is cut or averaged.
    assert {len(line) for line in lines[1:-1]} == {2 + len(matrix[0])}


def test_activations_count_what_was_routed(inspect):
    rows = json.loads(inspect("activations", "--json"))["rows"]
    assert [row["tokens"] for row in rows] == [60] * 3
    assert [row["never_used"] for row in rows] == [1] * 3
    experts = json.loads(inspect("activations", "--layer", "2", "--json"))["rows"]
    used = LAYERS[2].pairs.sum(axis=1) // 2  # each of a token's three experts is in two pairs
    assert [row["tokens"] for row in experts] == used.tolist()


def test_pairs_of_a_layer_come_in_falling_order(inspect):
    rows = json.loads(inspect("coactivation", "--layer", "0", "--json"))["rows"]
    counts = [row["tokens"] for row in rows]
    assert counts == sorted(counts, reverse=True)
    assert all(row["tokens"] == LAYERS[0].pairs[row["i"], row["j"]] for row in rows)
    assert len(rows) == (LAYERS[0].pairs > 0).sum() // 2


def test_buddies_of_a_layer_name_every_pivot(inspect):
    rows = json.loads(inspect("buddies", "--layer", "0", "--json"))["rows"]
    assert [row["pivot"] for row in rows] == list(range(SHAPE.num_experts))
    assert rows[7]["buddies_q"] == "-"


def test_presets_say_what_they_need_or_wait_for(inspect):
    rows = {row["preset"]: row for row in json.loads(inspect("presets", "--json"))["rows"]}
    assert rows["promoe"]["needs"] == "predictors"
    assert rows["hobbit"]["needs"] == "replicas" and rows["hobbit"]["waits_for"] is None
    assert rows["on-demand"]["needs"] is None


def test_presets_are_a_line_each_and_one_is_a_sheet(inspect, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = inspect("presets").splitlines()
    rows = [line for line in lines if line.startswith("│ ")]
    assert max(map(len, lines)) <= 80 and [row.split()[1] for row in rows].count("horizon") == 1
    assert len(rows) == len(presets()) and "Lossless" in lines[0]
    said = inspect("presets", "moepic")
    assert "│ eviction " in said and "│ lcp " in said and "MoEpic (2025)" in said
    [row] = json.loads(inspect("presets", "moepic", "--json"))["rows"]
    assert row["preset"] == "moepic" and row["scope"] == "layer"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["presets", "horizn"], 2, r"unknown preset 'horizn'; did you mean horizon\?$"),
        (["budies"], 2, r"unknown name 'budies'; did you mean buddies\?$"),
        (["entropy", "--layer", "3"], 2, "no layer 3: the model's MoE layers are 0 to 2"),
        (["runs", "--heatmap"], 2, "runs has no heatmap"),
        (["buddies", "--run", "1"], 5, "run 1 of .* holds no buddies"),
        (["buddies", "--run", "7"], 3, "has no run 7"),
    ],
)
def test_what_is_not_there(store, capsys, arguments, code, message):
    assert main(["inspect", *arguments, "--store", str(store)]) == code
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("moectl: ") and said.err.count("\n") == 1
    assert re.search(message, said.err)


def test_a_missing_store(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MOECTL_STORE", str(tmp_path / "none.duckdb"))
    assert main(["inspect"]) == 3
    assert f"there is no store {tmp_path / 'none.duckdb'}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ARTEFACTS)
def test_every_artefact_is_a_picture_in_a_file(inspect, tmp_path, name):
    picture = tmp_path / "out.svg"
    assert str(picture) in inspect(name, "--picture", str(picture))
    drawn = ElementTree.parse(picture)
    assert drawn.getroot().tag == f"{SVG}svg" and len(list(drawn.iter(f"{SVG}path"))) > 1


def test_a_picture_says_what_it_shows(inspect, tmp_path):
    inspect("coactivation", "--layer", "1", "--picture", str(tmp_path / "out.svg"))
    assert "q[j|i] in layer 1" in (tmp_path / "out.svg").read_text()


def test_no_picture(store, tmp_path, capsys):
    for arguments, told in (
        (("runs", "--picture", "out.svg"), "runs has no picture"),
        (("entropy", "--picture", "out.png"), "a picture is written as .svg, not '.png'"),
        (("entropy", "--picture", str(tmp_path / "no" / "out.svg")), "there is no folder"),
    ):
        assert main(["inspect", *arguments, "--store", str(store)]) in (2, 3)
        assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
