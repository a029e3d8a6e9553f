"""A live `moectl bench` as a user runs it: rows, the store, resumption after Ctrl-C, tasks and
peers."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from artifacts.store.store import Store
from moectl.bench import live
from moectl.cli import main
from profilers.compare import peers
from tests.helpers.bench import FEW, LIVE, SAME, Benched, interrupting

pytestmark = pytest.mark.slow

MEASURED = ("ttft_ms", "tpot_ms", "tpot_quartiles", "misses", "exposed_ms", "kl", "run")


def kept(row: dict) -> tuple:
    return tuple(row[name] for name in ("preset", "budget", "link", *MEASURED))


def test_live_rows(ran: tuple[dict, Path]) -> None:
    said, _ = ran
    measured = {(row["budget"], row["preset"]): row for row in said["rows"] if not row["why"]}
    assert measured.keys() == {("100%", "full")} | {
        (budget, preset)
        for budget in ("25%", "50%")
        for preset in ("on-demand", "near", "mixture-cache")
    }
    for (budget, preset), row in measured.items():
        assert row["mode"] == "live" and row["link"] == "5MB/s" and row["tpot_ms"] > 0
        assert row["tpot_quartiles"][0] <= row["tpot_ms"] <= row["tpot_quartiles"][1]
        assert (row["kl"] > 0) == (preset == "mixture-cache"), budget
    refused = {row["preset"]: row["why"] for row in said["rows"] if row["why"]}
    assert (
        refused.keys() == {"uniform-bits", "promoe"}
        and "moectl quantize" in refused["uniform-bits"]
    )
    assert "2 rounds in random order" in said["conditions"] and "oracle" in said["notes"][0]


def test_rows_go_by_budget_then_time_and_the_best_are_marked(ran: tuple[dict, Path]) -> None:
    rows = [row for row in ran[0]["rows"] if not row["why"]]
    assert [row["budget"] for row in rows] == ["25%"] * 3 + ["50%"] * 3 + ["100%"]
    for budget in ("25%", "50%"):
        group = [row for row in rows if row["budget"] == budget]
        assert [row["tpot_ms"] for row in group] == sorted(row["tpot_ms"] for row in group)
        assert (
            group[0]["best"].startswith("fastest")
            and sum("lossless" in row["best"] for row in group) == 1
        )
        assert not any("lossless" in row["best"] for row in group if row["kl"] > 0)
    assert rows[-1]["best"] == ""


def test_what_is_stored(ran: tuple[dict, Path]) -> None:
    said, folder = ran
    rows = [row for row in said["rows"] if row["run"]]
    assert {path.name for path in folder.iterdir()} == {"text.jsonl", "moe.duckdb"}
    with Store.open(folder / "moe.duckdb", read_only=True) as store:
        assert (
            sorted(row["run"] for row in rows)
            == [run.run_id for run in store.runs()]
            == list(range(1, 8))
        )
        for row in rows:
            info = store.run(row["run"]).info
            [written] = store.read("bench", row["run"]).to_pylist()
            assert written == {name: row[name] for name in written}
            assert (info.command, info.seed, info.tokens, info.data) == (
                "bench",
                5,
                24,
                "text.jsonl",
            )
            assert info.parameters["spread"]["tpot_ms"] == row["tpot_quartiles"]
            assert (
                info.parameters["machine"]["cores"] >= 1
                and info.parameters["pace"]["link"] == "5MB/s"
            )
            assert (
                info.model_id == store.models()[0].model_id
                and info.data_digest
                and info.versions["torch"]
            )


def test_answers_with_drafts_stand_beside_those_without(
    model: str, benched: Benched, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [model, *LIVE, "--presets", "on-demand", "--budgets", "50%", "--draft", "ngram=1:2"]
    rows = {row["preset"]: row for row in benched(*options)["rows"]}
    for name in ("full", "on-demand", "near"):
        row = rows[name]
        assert 0 <= row["acceptance"] <= 1 <= row["tokens_per_pass"] <= 3
        lower, upper = row["drafted_quartiles"]
        assert row["drafted_tpot_ms"] > 0 and 0 < lower <= row["drafted_ratio"] <= upper
    with Store.open("moe.duckdb", read_only=True) as store:
        [written] = store.read("bench", rows["near"]["run"]).to_pylist()
    assert written == {name: rows["near"][name] for name in written} and "acceptance" in written
    assert main(["bench", *options]) == 0
    said = capfd.readouterr().out
    assert "drafts by ngram=1:2" in said and "tokens a pass" in said
    assert rows["uniform-bits"]["acceptance"] is None


def write_task(text: str) -> None:
    Path("one.yaml").write_text(
        "task: one\ndataset_path: json\ndataset_kwargs: {data_files: {test: task.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: "
        "[' by', ' gate']\ndoc_to_target: 0\n"
    )
    Path("task.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{number} {text}"}) for number in range(3))
    )


def test_tasks_stand_beside_the_other_columns(
    model: str, benched: Benched, capfd: pytest.CaptureFixture[str]
) -> None:
    """Scores are resumed from the store, and measured anew when the task has changed."""
    write_task("an old dog")
    same = [
        model,
        *LIVE[:-4],
        "--rounds",
        "1",
        "--presets",
        "near",
        "--budgets",
        "25%",
        "--tasks",
        "one.yaml",
    ]
    rows = {row["preset"]: row for row in benched(*same)["rows"] if row["run"]}
    assert rows.keys() == {"full", "on-demand", "near"}
    for row in rows.values():
        assert [(score["task"], score["metric"], score["count"]) for score in row["tasks"]] == [
            ("one", metric, 3) for metric in ("acc", "acc_norm")
        ]
        assert row["tasks"] == rows["full"]["tasks"]
    with Store.open("moe.duckdb", read_only=True) as store:
        query = (
            "SELECT json_extract(parameters, '$.tasks[0].value')::DOUBLE AS value FROM runs ORDER "
            "BY run_id"
        )
        assert store.query(query)["value"].to_pylist() == [rows["full"]["tasks"][0]["value"]] * 3
    again = benched(*same)
    assert "3 settings were measured by an earlier run" in again["conditions"]
    assert {row["preset"]: row["tasks"] for row in again["rows"] if row["run"]} == {
        preset: row["tasks"] for preset, row in rows.items()
    }
    write_task("two old dogs")
    assert "earlier run" not in benched(*same)["conditions"]
    assert main(["bench", *same]) == 0
    assert "one acc" in capfd.readouterr().out


def test_a_live_bench_goes_on_after_an_interruption(
    model: str, benched: Benched, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the first round, and again when some settings have both rounds."""
    for after in (30, 110):
        with monkeypatch.context() as patched:
            patched.setattr(live, "progress_bar", interrupting(after))
            assert main(["bench", model, *LIVE, *FEW]) == 130
            told = capfd.readouterr().err
            command = shlex.join(["moectl", "bench", model, *LIVE, *FEW])
            assert told == f"moectl: interrupted: what was measured is kept; to go on: {command}\n"
    [half_done] = Path().glob("moe.duckdb.bench-*.jsonl")
    samples = [json.loads(line)["sample"] for line in half_done.read_text().splitlines()]
    with Store.open("moe.duckdb", read_only=True) as store:
        finished = [store.read("bench", run.run_id).to_pylist()[0] for run in store.runs()]
    assert 0 < len(finished) < 7 and 7 < len(samples) < 14
    whole = benched(model, *LIVE, *FEW)
    rows = {(row["preset"], row["budget"]): row for row in whole["rows"] if row["run"]}
    assert (
        len(rows) == 7
        and f"{len(finished)} settings were measured by an earlier run" in whole["conditions"]
    )
    for row in finished:
        assert rows[row["preset"], row["budget"]]["tpot_ms"] == row["tpot_ms"]
    assert not half_done.exists()
    again = benched(model, *LIVE, *FEW)
    assert [kept(row) for row in again["rows"]] == [kept(row) for row in whole["rows"]]
    anew = benched(model, *LIVE, *FEW, "--again")
    assert min(row["run"] for row in anew["rows"] if row["run"]) == 8
    counted = [
        {(row["preset"], row["budget"]): row["misses"] for row in said["rows"]}
        for said in (whole, anew)
    ]
    assert counted[0] == counted[1]


def test_another_text_is_another_bench(model: str, benched: Benched) -> None:
    first = benched(model, *LIVE, "--presets", "near", "--budgets", "25%")
    other = benched(model, *LIVE, "--presets", "near", "--budgets", "25%", "--tokens", "36")
    assert {row["run"] for row in first["rows"] if row["run"]}.isdisjoint(
        row["run"] for row in other["rows"]
    )


def test_experts_computed_otherwise_are_another_bench(model: str, benched: Benched) -> None:
    first = benched(model, *LIVE, "--presets", "near", "--budgets", "25%")
    fused = benched(model, *LIVE, "--presets", "near", "--budgets", "25%", "--experts", "fused")
    assert {row["run"] for row in first["rows"] if row["run"]}.isdisjoint(
        row["run"] for row in fused["rows"]
    )
    assert "fused" in fused["conditions"] and "fused" not in first["conditions"]


def test_the_proportions_of_a_machine(model: str, benched: Benched) -> None:
    rows = benched(
        model, *LIVE, "--presets", "specmd", "--budgets", "50%", "--scaled-to", "a100-pcie4"
    )["rows"]
    assert {row["link"] for row in rows} == {"a100-pcie4"}
    with Store.open("moe.duckdb", read_only=True) as store:
        paces = [run.info.parameters["pace"] for run in store.runs()]
    assert paces[0].keys() == {"link", "near", "window", "machine", "experts"}
    assert all(pace == paces[0] for pace in paces)


def test_the_tables(ran: tuple[dict, Path], model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The tables are made from the store."""
    shutil.copyfile(ran[1] / "moe.duckdb", "moe.duckdb")
    assert main(["bench", model, *SAME]) == 0
    out = capfd.readouterr().out
    assert all(
        word in out for word in ("perplexity ratio", "fastest", "Not run", "25%, 50%", "no oracle")
    )
    assert out.count("promoe") == 1 and "predictors" in out, "one line, and the reason in it"


def test_peers_stand_beside(model: str, benched: Benched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer runs in a process of its own; its row has times and quality and is never marked as the
    best."""
    monkeypatch.setattr(peers, "read_here", None)
    options = ["--presets", "near", "--budgets", "50%", "--links", "1MB/s", "--rounds", "1"]
    said = benched(model, *LIVE, *options, "--peers", "transformers-eager,accelerate-cpu")
    rows = {row["preset"]: row for row in said["rows"]}
    plain = rows["transformers-eager"]
    assert (plain["mode"], plain["budget"], plain["link"], plain["best"]) == (
        "peer",
        "100%",
        "none",
        "",
    )
    assert (
        plain["tpot_ms"] > 0 and plain["kl"] < 1e-6 and plain["hit_rate"] is None and plain["run"]
    )
    assert (
        "needs a GPU" in rows["accelerate-cpu"]["why"] and rows["accelerate-cpu"]["mode"] == "peer"
    )
    assert "processes of their own" in said["notes"][1]
    with Store.open("moe.duckdb", read_only=True) as store:
        assert set(store.run(plain["run"]).contents) == {"bench"}
