"""Every kind of bad input gives one clear line on stderr, its exit code, nothing on stdout, and no
file.

tests/faults/test_11_checkpoint.py has the messages for damaged checkpoints.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from moectl.cli import main
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.families import COMMON, VOCABULARY
from tests.helpers.said import problems

pytestmark = pytest.mark.slow

GATE = "model.layers.0.mlp.gate.weight"
EXPERT = ".mlp.experts."
SHORT = ("--tokens", "64", "--length", "16", "--batch", "2")

Refused = Callable[..., None]


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Refused:
    """`refused(*arguments, code=3, says="text")` checks how a command fails, in a folder of its
    own."""
    monkeypatch.chdir(tmp_path)

    def check(*arguments: object, code: int, says: str) -> None:
        before = contents(tmp_path)
        capfd.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        said = capfd.readouterr()
        assert said.out == ""
        err = problems(said.err)
        assert err.startswith("moectl: ") and err.count("\n") == 1 and err.endswith("\n"), said.err
        assert says in err
        assert contents(tmp_path) == before

    return check


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("olmoe")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {line} of what is profiled.\n" for line in range(20)))
    return path


# Models


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: tensor.clone() for name, tensor in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )

    return damage


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def dense(folder: Path) -> None:
    shutil.rmtree(folder)
    own = {name: value for name, value in COMMON.items() if name != "num_experts_per_tok"}
    LlamaForCausalLM(LlamaConfig(**own)).save_pretrained(folder)


def greedy_router(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 9}))


def foreign_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {
        text: index + VOCABULARY for text, index in tokenizer["model"]["vocab"].items()
    }
    tokenizer["added_tokens"] = []
    path.write_text(json.dumps(tokenizer))


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


DAMAGES = {
    "no such folder": (shutil.rmtree, "neither a folder here nor reachable"),
    "a dense model": (dense, "is not a Mixture-of-Experts model"),
    "a corrupt shard": (
        with_bytes(lambda data: data[:8] + b"\xff" + data[9:]),
        "truncated or no safetensors file",
    ),
    "a truncated shard": (with_bytes(lambda data: data[:-100]), "truncated or no safetensors file"),
    "a missing router": (with_tensors(lambda tensors: tensors.pop(GATE)), f"{GATE} is missing"),
    "a top-k above the experts": (greedy_router, "selects 9 experts per token but has only 8"),
    "experts that are not finite": (
        with_tensors(
            lambda tensors: [t.fill_(float("nan")) for name, t in tensors.items() if EXPERT in name]
        ),
        "holds NaN or infinity",
    ),
    "a router that is not finite": (
        with_tensors(lambda tensors: tensors[GATE].fill_(float("inf"))),
        f"{GATE} holds NaN or infinity",
    ),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "the tokenizer of another model": (
        foreign_tokenizer,
        f"is outside the vocabulary of {VOCABULARY}",
    ),
}


@pytest.mark.parametrize("command", ["run", "profile"])
@pytest.mark.parametrize("name", DAMAGES)
def test_models(
    name: str, command: str, refused: Refused, model: Path, text: Path, tmp_path: Path
) -> None:
    damage, says = DAMAGES[name]
    damage(folder := shutil.copytree(model, tmp_path / "model"))
    options = {"run": ("--prompt", "hello"), "profile": ("--data", text, *SHORT, "--trace")}[
        command
    ]
    refused(command, folder, *options, code=3, says=says)


# Options


@pytest.mark.parametrize("command", ["run", "profile"])
@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("0", "one expert a layer is the least: give at least 2x"),
        ("1B", "holds 0 experts"),
        ("1x", "holds 1 experts and one expert a layer is the least"),
        ("-25%", "is not understood"),
        ("abc", "is not understood"),
        ("", "is not understood"),
        ("nan", "is not understood"),
        ("1e999x", "is not understood"),
        ("2PiB", "unit 'PiB' in '2PiB' is not known"),
    ],
)
def test_budgets(
    budget: str, says: str, command: str, refused: Refused, model: Path, text: Path
) -> None:
    options = {"run": ("--prompt", "hello"), "profile": ("--data", text)}[command]
    refused(command, model, *options, "--budget", budget, code=2, says=says)


def test_budget_below_one_expert_in_global_scope(refused: Refused, model: Path) -> None:
    options = ("--prompt", "hello", "--scope", "global", "--budget", "0.9x")
    refused("run", model, *options, code=2, says="one expert is the least: give at least 1x")


def test_a_budget_above_the_model_is_fine(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "run",
                str(model),
                "--prompt",
                "hello",
                "--max-new-tokens",
                "2",
                "--budget",
                "1TiB",
                "--json",
            ]
        )
        == 0
    )
    said = capfd.readouterr()
    receipt = json.loads(said.out)["receipt"]
    assert receipt["slots"] == receipt["experts"] == 16
    assert any("every expert stays resident" in line for line in receipt["fallbacks"])
    assert said.err == ""


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--prompt", ""), 3, "the prompt is empty"),
        (("--prompt", "\udcff"), 3, "the prompt is not text in UTF-8"),
        (
            ("--prompt", "x" * 250, "--max-new-tokens", "7"),
            3,
            "250 prompt tokens and 7 new ones exceed",
        ),
        (("--prompt", "x", "--chat"), 2, "give either --prompt TEXT or --chat"),
        (("--chat", "--json"), 2, "--json and --trace go with --prompt"),
        (
            ("--prompt", "x", "--preset", "buddy"),
            2,
            "unknown preset 'buddy'; did you mean buddymoe?",
        ),
        (
            ("--prompt", "x", "--preset", "promoe"),
            5,
            (
                "the prefetch policy needs predictors, which the store does not hold: run `moectl "
                "build-predictor`"
            ),
        ),
        (
            ("--prompt", "x", "--preset", "hobbit"),
            5,
            "the miss policy needs replicas, which the store does not hold: run `moectl quantize`",
        ),
        (("--prompt", "x", "--avg-bits", "5"), 2, "hot: avg_bits is 16 or in 1..4, not 5"),
        (
            ("--prompt", "x", "--avg-bits", "3", "--residency", "hot"),
            2,
            "--avg-bits is short for --residency hot",
        ),
        (("--prompt", "x", "--miss", "shadow"), 5, "the miss policy needs replicas"),
        (
            ("--prompt", "x", "--eviction", "belady"),
            5,
            "needs next_use, the future of a trace: it runs in the",
        ),
        (
            ("--prompt", "x", "--eviction", "mru"),
            2,
            "unknown eviction policy 'mru'; did you mean lru?",
        ),
        (("--prompt", "x", "--prefetch", "next_gate:distanse=2"), 2, "did you mean distance?"),
        (
            ("--prompt", "x", "--eviction", "lru:age=2"),
            2,
            "unknown parameter of lru 'age'. Known: stamp",
        ),
        (
            ("--prompt", "x", "--prefetch", "next_gate:distance=far"),
            2,
            "takes a value of type int, not 'far'",
        ),
        (("--prompt", "x", "--scope", "planet"), 2, "scope is layer or global"),
        (("--prompt", "x", "--link", "fast"), 2, "rate 'fast' is not understood"),
        (("--prompt", "x", "--top-p", "1.5"), 2, "0 < top-p <= 1"),
        (("--prompt", "x", "--repetition-penalty", "nan"), 2, "repetition-penalty > 0"),
        (
            ("--prompt", "x", "--miss", "buddy:margin=nan"),
            2,
            "buddy:margin takes a value of type float, not 'nan'",
        ),
        (("--prompt", "x", "--device", "tpu"), 2, "device 'tpu' is not known: use auto, cpu, cuda"),
        (("--prompt", "x", "--device", "cuda:99"), 2, "cuda:99 is not among the"),
        (("--prompt", "x", "--trace", "no/such/trace.parquet"), 3, "there is no folder no/such"),
        (("--prompt", "x", "--trace", "."), 3, "it is a folder"),
    ],
)
def test_what_cannot_be_run(
    options: tuple[str, ...], code: int, says: str, refused: Refused, model: Path
) -> None:
    refused("run", model, *options, code=code, says=says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no data at 'data.txt'"),
        (b"", "holds no text"),
        (b" \n\t\n", "holds no text"),
        (b"x", "two tokens or more"),
    ],
)
def test_data(
    content: bytes | None, says: str, refused: Refused, model: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "data.txt").write_bytes(content)
    refused("profile", model, "--data", "data.txt", code=3, says=says)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            ("--length", "257", "--batch", "1"),
            3,
            "sequences of 257 tokens exceed the model's 256 positions",
        ),
        (("--shard", "3/2"), 2, "shard 3/2 does not exist"),
        (("--shard", "half"), 2, "write i/N"),
        (("--shard", "9/9"), 3, "shard 9/9 has no data"),
        (("--store", "no/such/moe.duckdb"), 3, "there is no folder no/such"),
        (("--store", "."), 3, "is a folder"),
        (("--store", "text.txt"), 3, "is not a store"),
    ],
)
def test_what_cannot_be_profiled(
    options: tuple[str, ...], code: int, says: str, refused: Refused, model: Path, text: Path
) -> None:
    refused("profile", model, "--data", text, *options, code=code, says=says)


# Stores


@pytest.fixture
def profiled(model: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A store with a profile of `model` and no buddies."""
    path = tmp_path / "moe.duckdb"
    assert main(["profile", str(model), "--data", str(text), *SHORT, "--store", str(path)]) == 0
    return path


BUDDIES = ("--prompt", "hello", "--preset", "buddymoe")


def test_store_of_another_model(
    refused: Refused, profiled: Path, model: Path, checkpoint: Checkpoint
) -> None:
    other = checkpoint("mixtral")
    refused("run", other, *BUDDIES, "--store", profiled, code=5, says=f"{profiled} holds {model} (")


def test_store_without_what_the_preset_needs(refused: Refused, profiled: Path, model: Path) -> None:
    refused("run", model, *BUDDIES, "--store", profiled, code=5, says="then `moectl build-buddies`")
    published = ("--prompt", "hello", "--preset", "buddymoe-paper")
    refused(
        "run",
        model,
        *published,
        "--store",
        profiled,
        code=5,
        says="build-buddies --metric coactivation`",
    )


def test_no_store_for_a_preset_that_needs_one(refused: Refused, model: Path) -> None:
    refused("run", model, *BUDDIES, "--store", "moe.duckdb", code=5, says="run `moectl profile`")


HOLD = "import sys, duckdb; c = duckdb.connect(sys.argv[1]); print(flush=True); sys.stdin.read()"


@pytest.fixture
def holder(profiled: Path) -> Iterator[int]:
    """The process id of another process that has the store open."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(profiled)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


@pytest.mark.parametrize("command", ["run", "profile"])
def test_store_in_use(
    refused: Refused, holder: int, profiled: Path, model: Path, text: Path, command: str
) -> None:
    options = {"run": BUDDIES, "profile": ("--data", text, *SHORT)}[command]
    refused(
        command, model, *options, "--store", profiled, code=4, says=f"in use by process {holder};"
    )


# As a process of its own


def test_a_real_process_says_one_line(model: Path, tmp_path: Path) -> None:
    """No library adds a line, neither behind Python's back nor at its end."""
    with_tensors(lambda tensors: tensors.pop(GATE))(
        folder := shutil.copytree(model, tmp_path / "model")
    )
    done = subprocess.run(
        [sys.executable, "-m", "moectl", "run", str(folder), "--prompt", "hello"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        problems(done.stderr)
        == f"moectl: {GATE} is missing from the checkpoint: download it again\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
