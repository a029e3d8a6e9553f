"""`moectl quantize`, also interrupted, killed and with files damaged afterwards."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from artifacts.errors import BadUsage
from artifacts.quantisation.widths import TRELLIS_WIDTHS, USUAL_WIDTHS
from artifacts.store.check import check_store
from artifacts.store.store import Store
from moectl.cli import main
from moectl.commands.build.quantize import parse_bits, spoken
from runtime.model.files.checkpoint import StoredTensor, open_checkpoint
from runtime.model.files.fingerprint import _places
from runtime.model.open import open_model
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.rewritten import invert
from tests.helpers.said import problems

pytestmark = pytest.mark.slow

OPTIONS = (
    "--data",
    "text.txt",
    "--samples",
    "24",
    "--length",
    "32",
    "--recipe",
    "refined",
    "--jobs",
    "1",
)


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint; commands run in the test's own folder, with a text in it."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f"Line {line}: {line * line} sheep and a {'very ' * (line % 5)}old dog.\n"
        for line in range(40)
    ]
    Path("text.txt").write_text("".join(lines))
    return str(checkpoint("olmoe"))


def said_by(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Return what a command prints: stdout, or the line on stderr when it fails."""
    capfd.readouterr()
    assert main(list(arguments)) == code
    said = capfd.readouterr()
    assert (said.err == "") == (code == 0) and (said.out == "") == (code != 0)
    assert code == 0 or problems(said.err).count("\n") == 1
    return said.out or said.err


def files(store: str) -> dict[str, bytes]:
    root = Path(f"{store}.replicas")
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("L*.safetensors"))
    }


def start(model: str, *options: str) -> subprocess.Popen:
    """Start the command in a process of its own; only that process signals its workers."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moectl", "quantize", model, *OPTIONS[:-2], *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def wait_until(is_there: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + 300
    while not is_there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_what_is_said_of_replicas(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = json.loads(said_by(capfd, "quantize", model, *OPTIONS, "--bits", "4,2", "--json"))
    assert (said["run"], said["experts"], said["resumed_experts"]) == (1, 16, 0)
    assert said["bytes"].keys() == {"2", "4"} and said["borrowing"] >= 0
    assert [layer["layer"] for layer in said["layers"]] == [0, 1]
    assert all(0 < layer["4_bits"] < layer["2_bits"] < 1 for layer in said["layers"])
    assert len(files("moe.duckdb")) == 16
    again = said_by(capfd, "quantize", model, *OPTIONS, "--bits", "4,2")
    assert "16 done before" in again and "Relative error" in again
    with Store.open("moe.duckdb", read_only=True) as store:
        [first, second] = [run.run_id for run in store.runs()]
        assert store.read("quant_loss", first).equals(store.read("quant_loss", second))


def test_what_was_written_is_shown_and_verified(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said_by(capfd, "quantize", model, *OPTIONS)
    losses = json.loads(said_by(capfd, "inspect", "quant-loss", "--layer", "1", "--json"))
    assert (
        len(losses["rows"]) == 8
        and {"tokens", "judged_on_own", "1_bits"} <= losses["rows"][0].keys()
    )
    assert "borrowing" in said_by(capfd, "inspect", "quant-loss")
    for name in ("quant-loss", "replicas"):
        assert said_by(capfd, "inspect", name, "--heatmap").count("\n") >= 3
    assert "all 16 files are what was written" in said_by(capfd, "inspect", "replicas", "--verify")
    listed = json.loads(said_by(capfd, "inspect", "replicas", "--layer", "0", "--json"))["rows"]
    assert len(listed) == 8 * 4 and listed[0]["bytes"] > 0
    path = Path("moe.duckdb.replicas") / listed[0]["file"]
    whole = path.read_bytes()
    other = path.with_name("L001-E001.safetensors").read_bytes()
    for damaged in (whole[:-1], whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:], other):
        path.write_bytes(damaged)
        assert "1 of 16 replica files" in said_by(capfd, "inspect", "replicas", "--verify", code=3)
    path.unlink()
    assert "No such file" in said_by(capfd, "inspect", "replicas", "--verify", code=3)
    said_by(capfd, "quantize", model, *OPTIONS)
    assert path.read_bytes() == whole
    assert "all 16 files" in said_by(capfd, "inspect", "replicas", "--verify")


def test_a_model_of_other_weights_is_not_served_by_the_old_ones_replicas(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The old model's store is asked about one whose experts alone are others, header and sizes
    being the same."""
    new = str(shutil.copytree(model, tmp_path / "new"))
    said_by(capfd, "quantize", model, *OPTIONS, "--bits", "4")
    assert "no findings" in said_by(capfd, "inspect", "store", model, "--verify")
    invert(Path(new), "model.layers.1.mlp.experts.3.up_proj.weight")
    for options in (("--base", "4"), ("--preset", "shadow")):
        said = said_by(
            capfd, "run", new, "--prompt", "x", "--max-new-tokens", "1", *options, code=5
        )
        assert re.search(r"moe\.duckdb holds .*/olmoe.* \(\w{16}\), not .*/new \(\w{16}\)", said)
    assert checked(capfd, new) == [new], "the store does not hold it"
    again = json.loads(said_by(capfd, "quantize", new, *OPTIONS, "--bits", "4", "--json"))
    assert (again["resumed_experts"], again["remade_experts"]) == (0, 0) and len(
        files("moe.duckdb")
    ) == 32
    assert checked(capfd, new) == [] == checked(capfd, model)


def test_a_byte_between_the_samples_is_seen_where_experts_are_compared(
    checkpoint: Checkpoint, model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint("olmoe", "fused"), tmp_path / "fused")
    said_by(capfd, "quantize", str(folder), *OPTIONS, "--bits", "4")
    before = open_model(str(folder)).fingerprint
    tensor = open_checkpoint(folder).tensors["model.layers.0.mlp.experts.gate_up_proj"]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(tensor.offset + 5 * tensor.nbytes // 8 + next(_unsampled(tensor, expert=5)))
        file.write(bytes([1, 2]))
    assert open_model(str(folder)).fingerprint == before, "this is what the samples do not see"
    assert checked(capfd, str(folder)) == ["run 1"]
    assert "15 done before, 1 of other weights made again" in said_by(
        capfd, "quantize", str(folder), *OPTIONS, "--bits", "4"
    )


def test_replicas_of_another_format_are_refused(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said_by(capfd, "quantize", model, *OPTIONS, "--bits", "4")
    with Store.open("moe.duckdb") as store:
        paths = sorted(Path("moe.duckdb.replicas").rglob("L*.safetensors"))
        for path in paths:
            path.write_bytes(path.read_bytes().replace(b"moectl-replica-2", b"moectl-replica-1"))
        [finding] = check_store(store).findings
    assert "16 of 16 replica files are not what was written" in finding.says
    said = said_by(
        capfd, "run", model, "--prompt", "x", "--max-new-tokens", "1", "--base", "4", code=3
    )
    assert "its format is moectl-replica-1, not moectl-replica-2" in said


def checked(capfd: pytest.CaptureFixture[str], model: str) -> list[str]:
    """What `moectl inspect store MODEL --verify` has findings about."""
    capfd.readouterr()
    code = main(["inspect", "store", model, "--verify", "--json"])
    findings = json.loads(capfd.readouterr().out)["findings"]
    assert code == (3 if findings else 0)
    return [finding["about"] for finding in findings]


def _unsampled(tensor: StoredTensor, *, expert: int) -> Iterator[int]:
    """Offsets in a slice of a fused tensor that the fingerprint does not read."""
    nbytes = tensor.nbytes // 8
    sampled = {
        offset + byte - expert * nbytes
        for offset, count in _places(tensor)
        for byte in range(count)
    }
    return (offset for offset in range(0, nbytes, 4) if not {offset, offset + 1} & sampled)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            ["--bits", "2,6"],
            2,
            "replicas of the recipe refined have 1, 2, 3, 4 or 8 bits, not 2, 6",
        ),
        (["--bits", "two"], 2, "write widths with commas, as 2,4"),
        (
            ["--group-size", "12"],
            2,
            "groups of 12 do not divide the inputs of the experts' projections",
        ),
        (["--recipe", "best"], 2, "the recipe is plain, refined or trellis"),
        (["--samples", "0"], 2, "greater than or equal to 1"),
        (["--data", "nowhere.txt"], 3, "no data at 'nowhere.txt'"),
        (["--length", "400"], 3, "256"),
        (["--store", "missing/moe.duckdb"], 3, "there is no folder missing"),
        (["--store", "text.txt"], 3, "not a store"),
    ],
)
def test_what_cannot_be_done_is_said(
    options: list[str], code: int, says: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("A" * 3000)
    capfd.readouterr()
    assert main(["quantize", model, *OPTIONS, *options]) == code
    said = capfd.readouterr()
    assert says in said.err and said.out == ""
    assert {path.name for path in Path.cwd().iterdir()} == {"text.txt"}


@pytest.mark.parametrize(
    ("bits", "recipe", "chosen"),
    [
        (None, None, (TRELLIS_WIDTHS, "trellis")),
        (None, "refined", (USUAL_WIDTHS, "refined")),
        ("4,1.5", None, ((1.5, 4), "trellis")),
        ("1,8", None, ((1, 8), "refined")),
        ("2,4", "plain", ((2, 4), "plain")),
        ("0.6,8", None, ((0.6, 8), "trellis")),  # which is refused, for no recipe makes both
    ],
)
def test_the_recipe_that_loses_least_is_taken_where_it_makes_the_widths(
    bits: str | None, recipe: str | None, chosen: tuple
) -> None:
    assert parse_bits(bits, recipe) == chosen
    assert parse_bits(None, None, group_size=64)[1] == "refined"
    with pytest.raises(BadUsage, match="trellis codes have no groups"):
        parse_bits(None, "trellis", group_size=64)


def test_a_store_without_replicas_says_so(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    profile = ("--tokens", "64", "--length", "16", "--no-similarity", "--data", "text.txt")
    said_by(capfd, "profile", model, *profile)
    assert "holds no replicas" in said_by(capfd, "inspect", "replicas", code=5)
    assert "--verify reads what is on the disk" in said_by(
        capfd, "inspect", "runs", "--verify", code=2
    )


def test_ctrl_c_ends_it_and_the_same_command_completes(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start(model, "--jobs", "2")
    wait_until(lambda: len(files("moe.duckdb")) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, which signals the workers too
    out, err = process.communicate(timeout=60)
    *told, said = err.splitlines()
    assert (process.returncode, out) == (130, "") and all("/3 " in line for line in told)
    assert said.startswith(
        "moectl: interrupted: finished experts are kept; to go on: moectl quantize "
    )
    assert not list(Path("moe.duckdb.replicas").rglob(".*.tmp")) and not Path("moe.duckdb").exists()
    assert not list(Path("moe.duckdb.replicas").rglob(".scratch"))
    said = json.loads(said_by(capfd, "quantize", model, *OPTIONS, "--json"))
    assert said["resumed_experts"] >= 2 and len(files("moe.duckdb")) == 16


def test_a_long_wait_in_words() -> None:
    assert [spoken(seconds) for seconds in (0.2, 45, 89, 200, 5000, 6000, 90000)] == [
        "a second",
        "45 s",
        "89 s",
        "3.3 min",
        "83 min",
        "1.7 h",
        "25 h",
    ]
