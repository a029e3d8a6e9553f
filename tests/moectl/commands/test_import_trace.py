"""`moectl import-trace`: what it writes is simulated, and what it refuses leaves nothing behind."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from artifacts.importers import KINDS
from moectl.cli import main

CSV = "layer_id,expert_ids\n" + "".join(
    f"{layer},{token % 5} {5 + layer}\n" for token in range(6) for layer in range(2)
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text(CSV)
    return tmp_path


def test_what_is_written_is_simulated(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["import-trace", "log.csv", "--as", "csv", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["trace"], said["passes"], said["tokens_decoded"], said["highest_expert"]) == (
        "log-trace.parquet",
        6,
        6,
        6,
    )
    assert "weights" not in pq.read_schema("log-trace.parquet").names, "weights were made up"
    assert (
        main(
            [
                "simulate",
                "--trace",
                "log-trace.parquet",
                "--num-experts",
                "8",
                "--budget",
                "6x",
                "--json",
            ]
        )
        == 0
    )
    receipt = json.loads(capfd.readouterr().out)["receipt"]
    assert any("no column weights" in line for line in receipt["assumed"])


def test_the_first_tokens_of_logits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.save("logits.npy", np.random.default_rng(0).normal(size=(2, 9, 8)))
    options = ["--as", "router-logits", "--top-k", "2", "--tokens", "4", "--out", "few.parquet"]
    assert main(["import-trace", "logits.npy", *options]) == 0
    said = capfd.readouterr().out
    assert (
        "tokens decoded" in said and "assumed: probabilities are the softmax of the logits" in said
    )
    assert {"weights", "probabilities"} <= set(pq.read_schema("few.parquet").names)
    assert (
        main(["simulate", "--trace", "few.parquet", "--compare", "score,lru", "--budget", "50%"])
        == 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_the_file_that_is_not_there(
    kind: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-trace", "none.log", "--as", kind, "--top-k", "2"]) == 3
    assert "none.log" in capfd.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["log.csv"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("log.csv", "--as", "cvs"), 2, "unknown kind of log 'cvs'; did you mean csv?"),
        (("log.csv", "--as", "moe-jsonl"), 3, "log.csv, line 1 is no JSON"),
        (("log.csv", "--as", "vllm"), 3, "log.csv, line 1 is no JSON"),
        (
            ("log.csv", "--as", "csv", "--batch", "4"),
            3,
            "log.csv makes no trace: no call has exactly 4 tokens",
        ),
        (("log.csv", "--as", "csv", "--out", "log.csv"), 3, "log.csv is the log itself"),
        (("log.csv", "--as", "csv", "--out", "no/where.parquet"), 3, "there is no folder no"),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...], code: int, says: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-trace", *options]) == code
    said = capfd.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and said.out == ""
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"log.csv": CSV}
