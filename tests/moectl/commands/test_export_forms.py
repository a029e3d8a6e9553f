"""`moectl export --what ...`: the written forms equal what the store holds, layer for layer."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from artifacts.store.rows import activation_matrices, buddy_matrices
from artifacts.store.store import Store
from moectl.cli import main
from tests.conftest import Checkpoint
from tests.moectl.commands.test_quantize import said_by

pytestmark = pytest.mark.slow

BLOCKS = {"deepseek_v2": [1, 2], "qwen3_moe": [0, 2]}  # numbers of the MoE layers among all three
PROFILE = ("--tokens", "300", "--length", "16", "--prefill", "8", "--samples", "20", "--trace")

Exported = Callable[..., str]


@pytest.fixture(scope="module", params=BLOCKS)
def family(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple:
    """The family's name, and a store with its profile, buddies and a split."""
    folder = tmp_path_factory.mktemp("exports")
    text = folder / "text.txt"
    store = ["--store", str(folder / "moe.duckdb")]
    text.write_text("Twelve sheep and a very old dog.\n" * 40)
    for command in (
        ["profile", str(checkpoint(request.param)), "--data", str(text), *PROFILE],
        ["build-buddies", "--metric", "coactivation", "--k-max", "3"],
        ["split", "--machine", "5gbps", "--budget", "50%", "--zeta", "0.1"],
    ):
        assert main([*command, *store]) == 0
    return request.param, folder / "moe.duckdb"


@pytest.fixture
def model(family: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The family's name; commands find its store."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(family[1], "moe.duckdb")
    return family[0]


@pytest.fixture
def exported(capfd: pytest.CaptureFixture[str]) -> Exported:
    return lambda what, *options: said_by(capfd, "export", "--what", what, *options)


def test_what_comes_out_is_what_the_store_holds(model: str, exported: Exported) -> None:
    with Store.open("moe.duckdb", read_only=True) as store:
        counts, weights = activation_matrices(store.read("activations", 1), 2, 8)["decode"]
        table, q = buddy_matrices(store.read("buddies", 2), 2, 8)
    lists = json.loads(exported("buddies"))
    assert (lists["run"], lists["num_experts"], len(lists["buddies"])) == (2, 8, 2)
    for layer, pivot in np.ndindex(2, 8):
        is_one = table[layer, pivot] >= 0
        assert lists["buddies"][layer][pivot] == table[layer, pivot][is_one].tolist()
        assert lists["q"][layer][pivot] == q[layer, pivot][is_one].tolist()
    split = json.loads(exported("splits"))["layers"]
    assert [one["layer"] for one in split] == [0, 1] and sum(one["budget"] for one in split) <= 8
    told = json.loads(exported("profile"))
    assert told["phases"]["decode"] == {"count": counts.tolist(), "weight": weights.tolist()}
    assert np.shape(told["entropy"]) == (2, 101) and told["tokens"] == 300
    rows = list(csv.DictReader(io.StringIO(exported("routing"))))
    assert len(rows) == 2 * 2 * 8 and rows[0]["phase"] == "decode"
    assert [int(row["count"]) for row in rows[:16]] == counts.ravel().tolist()
    assert [float(row["weight"]) for row in rows[:16]] == weights.ravel().tolist()


def test_a_placement_is_what_is_used_most(model: str, exported: Exported) -> None:
    told = json.loads(exported("placement", "--budget", "5x"))
    with Store.open("moe.duckdb", read_only=True) as store:
        counts = sum(
            count for count, _ in activation_matrices(store.read("activations", 1), 2, 8).values()
        )
    kept = np.zeros((2, 8), bool)
    for layer, experts in enumerate(told["layers"]):
        kept[layer, experts] = True
    assert kept.sum() == told["experts"] == 5 and counts[kept].min() >= counts[~kept].max()
    assert told["covers"] == pytest.approx(counts[kept].sum() / counts.sum())


def test_llama_cpp_keeps_whole_layers(model: str, exported: Exported) -> None:
    """As in llama.cpp: the part before `=` is searched for in every tensor's name."""
    first, second = BLOCKS[model]
    placed = json.loads(exported("placement", "--budget", "50%"))["layers"]
    line = exported("override-tensor", "--budget", "50%")
    pattern, buffer = re.fullmatch(
        r'--n-gpu-layers 999 --override-tensor "(.+)=(\w+)"\n', line
    ).groups()
    away = first if len(placed[1]) > len(placed[0]) else second
    named = [
        f"blk.{b}.ffn_{part}_exps.weight"
        for b in range(12)
        for part in ("up", "down", "gate", "gate_up")
    ]
    named += [
        f"blk.{b}.{part}"
        for b in range(3)
        for part in ("ffn_up.weight", "ffn_gate_inp.weight", "attn_q.weight")
    ]
    assert buffer == "CPU" and "," not in pattern
    assert {name for name in named if re.search(pattern, name)} == {
        f"blk.{away}.ffn_{part}_exps.weight" for part in ("up", "down", "gate", "gate_up")
    }
    assert exported("override-tensor", "--budget", "100%") == "--n-gpu-layers 999\n"


def test_a_file_instead_of_stdout(model: str, exported: Exported) -> None:
    assert "routing of run 1" in exported("routing", "--out", "routing.csv")
    assert Path("routing.csv").read_text() == exported("routing")
    told = json.loads(exported("placement", "--budget", "5x", "--json"))
    assert (
        told["content"] == json.loads(exported("placement", "--budget", "5x"))
        and told["out"] is None
    )


def test_what_cannot_be_exported_is_said(
    model: str, checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments, code, told in (
        (("--what", "budies"), 2, "buddies"),
        (("--what", "routing", "--run", "2"), 5, "holds no activations"),
        (("--what", "routing", "--budget", "5x", "--out", "no/there.csv"), 3, "no folder"),
        (("--what", "placement", "--budget", "x"), 2, "budget"),
        (("--what", "buddies", "--store", "no.duckdb"), 3, "there is no store"),
        ((), 2, "give --out FOLDER"),
        ((str(checkpoint("mixtral")), "--what", "routing"), 5, "holds"),
    ):
        assert told in said_by(capfd, "export", *arguments, code=code)
    assert main(["export", str(checkpoint(model)), "--what", "routing"]) == 0
