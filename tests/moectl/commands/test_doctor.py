"""`moectl profile --hardware`, `moectl doctor` and `--machine here`, and the findings."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.hardware.profile import COLD, Load
from artifacts.shape import Shape
from moectl.cli import main
from moectl.commands.start.doctor import findings as findings
from moectl.commands.start.doctor import measured as doctor_measured
from profilers.compare import check_prediction as prediction
from profilers.hardware.load_times import TimingEffort
from profilers.hardware.this_machine import LocalMachine
from tests.conftest import Checkpoint
from tests.helpers import gguf_files
from tests.helpers.measured import made

pytestmark = pytest.mark.slow

HERE = LocalMachine("abacus", 4, 3, 64 << 30, 32 << 30, None, 0.5, None, 0)
SHAPE = Shape(num_layers=2, num_experts=8, top_k=2, expert_nbytes=1 << 30)
DISK = ("--threads", "1", "--json")


@pytest.fixture(autouse=True)
def quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shortest measurement, in a folder of the test's own."""
    little = TimingEffort(lengths=(4,), turns=2)
    monkeypatch.setattr("profilers.hardware.load_times.THOROUGH", little)
    monkeypatch.setattr(doctor_measured, "QUICK", little)
    monkeypatch.setattr(prediction, "_TIMES", 1)
    monkeypatch.setattr(prediction, "_BETWEEN", little)
    monkeypatch.chdir(tmp_path)
    yield


@pytest.fixture
def model(checkpoint: Checkpoint) -> str:
    return str(checkpoint("olmoe"))


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments]) == 0
    out = capfd.readouterr()
    assert out.err == "" and out.out.count("\n") == 1
    return json.loads(out.out)


def test_a_profile_is_written_and_told(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    told = said(capfd, "profile", model, "--hardware", *DISK)
    assert (told["run"], told["conditions"]["link"], told["conditions"]["dtype"]) == (
        1,
        "disk",
        "float32",
    )
    assert [one["tokens"] for one in told["compute"]] == [1, 4]
    assert told["compute"][0]["moe"].keys() == {"median", "iqr", "samples"}
    assert {"disk", "ram"} <= {load["link"] for load in told["loads"]}
    assert main(["profile", model, "--hardware", "--threads", "1", "--link", "50MB/s"]) == 0
    sheets = capfd.readouterr().out
    assert "a layer but its experts" in sheets and "50MB/s" in sheets and "run 2: " in sheets
    assert main(["inspect", "runs"]) == 0
    assert "profile-hardware" in capfd.readouterr().out


def test_without_a_store_the_doctor_measures_and_writes_nothing(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    told = said(capfd, "doctor", model, *DISK, "--measure")
    assert told["hardware"]["is_stored"] is False and told["hardware"]["run"] is None
    assert told["prediction"]["budget"] == "25%" and told["prediction"]["tokens"] == 4 * 24
    remedies = [finding["remedy"] for finding in told["findings"] if finding["topic"] == "store"]
    assert remedies == [
        f"moectl profile {model}",
        "moectl build-buddies",
        f"moectl quantize {model}",
        f"moectl profile --hardware {model}",
    ]
    assert not list(Path.cwd().iterdir())


def test_the_quick_answer_imports_no_torch_and_writes_nothing(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a GGUF file too."""
    file = str(
        gguf_files.write(
            "qwen3_moe", tmp_path_factory.mktemp("gguf") / "model.gguf", gguf_files.mixed
        )
    )
    code = (
        "import sys, time\nfrom moectl.cli import main\n"
        f"codes = [main(['doctor', model, '--json']) for model in {[model, file]}]\n"
        "assert time.process_time() < 10\n"
        "sys.exit(any(codes) or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for told in map(json.loads, done.stdout.splitlines()):
        assert told["hardware"] is None and told["prediction"] is None
        assert {"gpu", "memory", "threads", "experts", "disk space", "store"} <= {
            each["topic"] for each in told["findings"]
        }
    assert not list(Path.cwd().iterdir())


def test_a_stored_profile_is_used_where_it_fits(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said(capfd, "profile", model, "--hardware", *DISK, "--store", "x.duckdb")
    for options in ((), ("--measure",)):
        told = said(capfd, "doctor", model, *DISK, "--store", "x.duckdb", *options)
        assert told["hardware"]["is_stored"] is True and told["hardware"]["run"] == 1
        assert bool(told["prediction"]) is bool(options)
        remedies = [
            finding["remedy"] for finding in told["findings"] if finding["topic"] == "store"
        ]
        assert remedies[0] == f"moectl profile {model} --store x.duckdb" and len(remedies) == 3
    other = said(
        capfd, "doctor", model, *DISK, "--store", "x.duckdb", "--link", "50MB/s", "--measure"
    )
    assert other["hardware"]["is_stored"] is False and other["prediction"]["link"] == "50MB/s"


def test_what_the_doctor_prints(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", model, "--threads", "1", "--measure"]) == 0
    out = capfd.readouterr().out
    for text in (
        "What stands in the way",
        "installation",
        "disk space",
        "no GPU",
        "The prediction",
        "predicted / measured",
        "not kept: ",
    ):
        assert text in out


def test_what_the_doctor_looks_at_is_told_as_it_does(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", model]) == 0
    out, told = capfd.readouterr()
    assert [line.partition(" s  ")[2] for line in told.splitlines()] == [
        "1/3 looking at what is installed",
        "2/3 looking at the machine",
        "3/3 looking at the model, the store and its disk",
    ]
    assert "What stands in the way" in out


def test_a_model_without_a_tokenizer_has_a_doctor(
    checkpoint: Checkpoint, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert said(capfd, "doctor", str(folder), *DISK, "--measure")["prediction"]["tokens"] == 4 * 24


def test_the_simulator_on_this_machine(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    prompt = (
        "--prompt",
        "hello",
        "--greedy",
        "--max-new-tokens",
        "4",
        "--trace",
        "t.parquet",
        "--json",
    )
    said(capfd, "run", model, *prompt)
    said(capfd, "profile", model, "--hardware", *DISK)
    options = ("--trace", "t.parquet", "--model", model, "--machine", "here", "--json")
    told = said(capfd, "simulate", *options)
    assert told["receipt"]["machine"] == "here" and told["tpot_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("profile", "--hardware", "--trace"), 2, "leave out --trace, --shard,"),
        (("profile", "--hardware", "--shard", "1/2"), 2, "leave out --trace, --shard,"),
        (("profile", "--hardware", "--jobs", "2"), 2, "--shard, --jobs and --executor"),
        (("profile", "--hardware", "--link", "fast"), 2, "rate 'fast' is not understood"),
        (("profile", "--hardware", "--link", "cuda"), 2, "needs the model on a CUDA device"),
        (("profile", "--hardware", "--device", "tpu"), 2, "device 'tpu' is not known"),
        (
            ("profile", "--hardware", "--store", "no/such/moe.duckdb"),
            3,
            "there is no folder no/such",
        ),
        (("profile", "no/such", "--hardware"), 3, "neither a folder here nor reachable"),
        (
            ("doctor", "no/such"),
            3,
            "neither a folder here nor a model of the hub that was downloaded",
        ),
        (("doctor", "no/such", "--measure"), 3, "neither a folder here nor reachable"),
        (("doctor", "--budget", "much"), 2, "is not understood"),
        (("doctor", "--link", "fast"), 2, "rate 'fast' is not understood"),
        (("doctor", "--device", "tpu"), 2, "device 'tpu' is not known"),
        (("doctor", "--device", "cuda:99", "--measure"), 2, "cuda:99 is not among the"),
        (("doctor", "--store", "."), 3, "is a folder"),
        (
            ("simulate", "--synthetic", "tokens=40,requests=1,prompt=8", "--machine", "here"),
            5,
            "there is no store moe.duckdb with a hardware profile: run `moectl profile --hardware`",
        ),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == code
    out = capfd.readouterr()
    assert out.out == "" and out.err.count("\n") == 1 and says in out.err, out.err
    assert not Path("moe.duckdb").exists()


def test_seconds_of_another_model_are_refused(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said(capfd, "profile", model, "--hardware", *DISK)
    assert (
        main(["simulate", "--synthetic", "tokens=40,requests=1,prompt=8", "--machine", "here"]) == 5
    )
    assert "hardware profiles of models of other shapes only" in capfd.readouterr().err


def test_a_budget_larger_than_memory_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalMachine, "look", lambda device: replace(HERE, available_nbytes=1000))
    assert main(["doctor", model, "--measure"]) == 4
    assert "1000 B can be had: give a smaller --budget" in capfd.readouterr().err


# Sentences


def sentence(here: LocalMachine, topic: str, shape: Shape = SHAPE) -> findings.DoctorFinding:
    return next(found for found in findings.of_machine(here, shape) if found.topic == topic)


def test_an_idle_machine_with_room_has_nothing_to_mend_but_a_gpu() -> None:
    assert [found.topic for found in findings.of_machine(HERE, SHAPE) if found.remedy] == ["gpu"]


def test_memory_smaller_than_the_experts() -> None:
    found = sentence(replace(HERE, available_nbytes=1 << 30), "memory")
    assert (
        "16.0 GiB, of RAM 1.0 GiB can be had: they do not fit" in found.says
        and found.remedy == "--link disk"
    )


def test_page_locked_memory_is_a_matter_of_gpus() -> None:
    gpu = replace(HERE, gpu="an accelerator", gpu_nbytes=8 << 30, locked_nbytes=8 << 20)
    assert sentence(gpu, "page-locked memory").remedy is None
    tight = sentence(replace(gpu, available_nbytes=10 << 30), "page-locked memory")
    assert "wants up to 16.0 GiB" in tight.says and "limit 8.0 MiB" in tight.says and tight.remedy
    assert "room for 50% of the experts" in sentence(gpu, "gpu").says
    assert "none is wanted" in sentence(HERE, "page-locked memory").says


@pytest.mark.parametrize(("threads", "remedy"), [(4, "--threads 3"), (1, "--threads 3"), (3, None)])
def test_threads(threads: int, remedy: str | None) -> None:
    assert sentence(replace(HERE, threads=threads), "threads").remedy == remedy


def test_other_work_is_told() -> None:
    assert "9.0 processes on 4 cores" in sentence(replace(HERE, load=9.0), "load").says


def test_disks() -> None:
    profile = made()
    [unknown] = findings.of_disk(profile)
    assert "cannot be told" in unknown.says and unknown.remedy is None
    for gbps, has_remedy in ((0.2, True), (3.0, False)):
        cold = Load(COLD, profile.loads[0].seconds, gbps)
        [found] = findings.of_disk(replace(profile, loads=(*profile.loads, cold)))
        assert (
            f"{gbps:.2g} GB/s, 1.2 times as long" in found.says and bool(found.remedy) is has_remedy
        )


def test_a_profile_of_another_machine() -> None:
    same = LocalMachine("abacus", 2, 1, 1, 1, None, 0.0, None, 0)
    assert findings.of_profile(made(), same) == []
    [found] = findings.of_profile(made(), replace(same, cores=64))
    assert "cores 2 then, 64 now" in found.says and found.remedy == "moectl profile --hardware"
