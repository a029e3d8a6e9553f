"""`moectl build-maps`: what it prints is in the store, and bad input is one line."""

import json
from pathlib import Path

import pytest

from artifacts.store.expert_maps import stored_maps
from artifacts.store.store import Store
from moectl.cli import main
from tests.conftest import Checkpoint

OPTIONS = (
    "--data",
    "text.txt",
    "--tokens",
    "600",
    "--length",
    "24",
    "--prefill",
    "8",
    "--batch",
    "4",
)


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint of two layers; commands run in the test's own folder, with a text in it."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(
        "".join(f"Line {line}: {line * line} sheep.\n" for line in range(40))
    )
    return str(checkpoint("olmoe"))


def test_what_is_said_is_in_the_store(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["build-maps", model, *OPTIONS, "--capacity", "50", "--distance", "2", "--json"]) == 0
    )
    said = capfd.readouterr()
    assert said.err == "" and said.out.count("\n") == 1
    built = json.loads(said.out)
    assert (built["run"], built["maps"], built["requests"], built["iterations"]) == (
        1,
        50,
        25,
        25 * 17,
    )
    assert (
        built["replaced"] == 25 * 17 - 50 and built["dtype"] == "float32" and built["distance"] == 2
    )
    with Store.open("moe.duckdb", read_only=True) as store:
        maps = stored_maps(store)
    assert len(maps) == 50 and maps.nbytes == built["bytes"] == built["bytes_when_full"]
    for options in ([], ["--layer", "1"], ["--heatmap"], ["--json"]):
        assert main(["inspect", "maps", *options]) == 0
        assert "maps" in capfd.readouterr().out
    assert (
        main(
            [
                "build-maps",
                model,
                *OPTIONS,
                "--distance",
                "1",
                "--requests",
                "3",
                "--dtype",
                "float16",
            ]
        )
        == 0
    )
    table = capfd.readouterr().out
    assert "Expert maps" in table and "run 2: 72 tokens in" in table
    with Store.open("moe.duckdb", read_only=True) as store:
        halved = stored_maps(store)
    assert (halved.dtype, halved.capacity, halved.distance, len(halved)) == (
        "float16",
        1000,
        1,
        3 * 17,
    )
    assert main(["inspect", "store"]) == 0
    assert "expert_maps" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--distance", "3"), 2, "the distance must be 1 to 2, the model's MoE layers, not 3"),
        (("--distance", "1", "--dtype", "float8"), 2, "unknown dtype 'float8'"),
        (("--distance", "1", "--capacity", "99999999999999999"), 4, "give a smaller capacity"),
        (("--distance", "1", "--data", "nowhere.txt"), 3, "no data at 'nowhere.txt'"),
        (("--distance", "1", "--store", "nowhere/moe.duckdb"), 3, "nowhere"),
    ],
)
def test_bad_input(
    options: tuple[str, ...], code: int, says: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["build-maps", model, *OPTIONS, *options]) == code
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("moectl: ") and said.err.count("\n") == 1
    assert says in said.err
    assert [path.name for path in Path.cwd().iterdir()] == ["text.txt"]
