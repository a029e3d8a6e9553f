"""`moectl run`: the tokens of transformers, one JSON object, a stream, a chat, a trace."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from artifacts.traces.parquet import read_parquet
from moectl.cli import main
from moectl.show.render import human_bytes
from runtime.control.build import build_controller
from runtime.control.counters import AT_BITS
from runtime.model.open import open_model
from runtime.policies import build
from runtime.policies.base import Artefacts
from runtime.policies.presets import Scope
from runtime.replay.replay import replay
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.said import problems

pytestmark = pytest.mark.slow

PROMPT = "It was a dark and stormy night;"


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("olmoe")


def run_json(capfd: pytest.CaptureFixture[str], *arguments: object) -> dict:
    """Return the JSON object that `moectl run ... --json` prints; it prints nothing else."""
    assert main(["run", *map(str, arguments), "--json"]) == 0
    said = capfd.readouterr()
    assert said.err == "" and said.out.count("\n") == 1
    return json.loads(said.out)


def test_a_run_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    """Each of these takes a tenth of a second or more, before the first token of every run; torch
    takes seconds, before which something is said."""
    code = (
        "import sys; from moectl.cli import main; told = []\n"
        "class Stderr:\n"
        "    def write(self, text): told.append('torch' in sys.modules)\n"
        "    def flush(self): pass\n"
        "    def isatty(self): return False\n"
        "sys.stderr = Stderr()\n"
        f"typed = ['run', '--prompt', {PROMPT!r}, '--greedy', '--max-new-tokens', '1']\n"
        "assert main([*typed, '--experts', 'exact']) == 0\n"
        "print([told[0], *sorted({name.partition('.')[0] for name in sys.modules})])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    is_torch_there, *names = literal_eval(done.stdout.splitlines()[-1])
    imported = set(names)
    assert is_torch_there is False
    assert {"torch", "transformers", "runtime"} <= imported
    assert not imported & {"datasets", "pandas", "pyarrow", "duckdb", "numba", "llvmlite", "ray"}


@pytest.mark.parametrize("preset", ["on-demand", "near", "specmd", "full"])
def test_greedy_tokens_are_those_of_transformers(
    preset: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    plain = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager").eval()
    with torch.inference_mode():
        expected = plain.generate(ids, max_new_tokens=24, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
    capfd.readouterr()
    said = run_json(
        capfd,
        model,
        "--preset",
        preset,
        "--budget",
        "25%",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        24,
        "--greedy",
    )
    assert said["token_ids"] == expected
    assert said["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert said.keys() == {
        "token_ids",
        "text",
        "counters",
        "by_layer",
        "receipt",
        "ttft_ms",
        "tpot_ms",
    }
    assert 0 < said["tpot_ms"] < 10_000 and 0 < said["ttft_ms"] < 10_000
    counters = said["counters"]
    assert counters["requests"] == counters["hits"] + counters["late"] + counters["misses"]
    assert {name: counters[name] for name in said["by_layer"][0]} == {
        name: sum(layer[name] for layer in said["by_layer"]) for name in said["by_layer"][0]
    }
    assert said["receipt"]["preset"] == preset
    assert said["receipt"]["slots"] == (16 if preset == "full" else 4)


def test_a_text_and_one_line_and_the_rest_on_request(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (model, "--prompt", PROMPT, "--max-new-tokens", 8, "--greedy")
    text = run_json(capfd, *options)["text"]
    assert main(["run", *map(str, options)]) == 0
    said = capfd.readouterr()
    assert said.out == f"{text}\n"
    loading, fused, budget, choice, line = said.err.splitlines()
    size = human_bytes(sum(path.stat().st_size for path in model.glob("*.safetensors")))
    assert loading == f"Loading {model}: {size}, preset auto, budget auto"
    assert fused == (
        "Experts fused: equal within rounding; --experts exact gives the model's own bits"
    )
    assert re.match(r"Budget 100% of experts \(.* free, less .* for 4,096 tokens and", budget)
    assert choice == "Preset full: every expert fits the budget"
    told = r"\d+\.\d tokens/s, first \d+ ms; hits \d+%; stall \d+ ms; full 100%; load \d\.\d s"
    assert re.fullmatch(told, line) and len(line) <= 80
    assert main(["run", *map(str, options), "--preset", "near", "--verbose"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith(f"{text}\n\nCounters")
    assert "│ all " in said.out and "8 tokens; first after" in said.out
    assert "Receipt" in said.out and "│ policies.eviction " in said.out
    assert said.err.count("\n") == 4


def test_text_comes_token_by_token(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (model, "--prompt", PROMPT, "--max-new-tokens", 6, "--greedy")
    text = run_json(capfd, *options)["text"]
    shown: list[str] = []

    class Screen(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    assert main(["run", *map(str, options)]) == 0
    assert shown[:6] == [text[: length + 1] for length in range(6)]


def test_the_same_seed_draws_the_same_tokens(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second, other = (
        run_json(capfd, model, "--prompt", PROMPT, "--max-new-tokens", 16, "--seed", seed)[
            "token_ids"
        ]
        for seed in (7, 7, 8)
    )
    assert first == second != other


def test_sampling_is_that_of_transformers(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt").input_ids
    plain = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager").eval()
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = plain.generate(
            ids,
            max_new_tokens=16,
            do_sample=True,
            temperature=1.5,
            top_k=20,
            top_p=0.9,
            repetition_penalty=1.2,
        )
    capfd.readouterr()
    options = (
        "--temperature",
        1.5,
        "--top-k",
        20,
        "--top-p",
        0.9,
        "--repetition-penalty",
        1.2,
        "--seed",
        3,
    )
    said = run_json(capfd, model, "--prompt", PROMPT, "--max-new-tokens", 16, *options)
    assert said["token_ids"] == expected[0, ids.shape[1] :].tolist()


def test_the_models_own_settings_are_followed_or_named(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "generation_config.json"
    asked = {
        "repetition_penalty": 1.7,
        "prompt_lookup_num_tokens": 5,
        "num_beams": 4,
        "temperature": 0.6,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    options = ("--prompt", PROMPT, "--max-new-tokens", 12, "--greedy")
    said = run_json(capfd, folder, *options)
    assert said["receipt"]["fallbacks"] == [
        (
            "generation_config.json asks for prompt_lookup_num_tokens 5: not followed, one pass "
            "gives one token"
        ),
        "generation_config.json asks for num_beams 4: not followed, one sequence is decoded",
        (
            "generation_config.json asks for temperature 0.6: not followed, the options of each "
            "request decide"
        ),
    ]
    ids = {
        penalty: run_json(capfd, model, *options, "--repetition-penalty", penalty)["token_ids"]
        for penalty in (1, 1.7)
    }
    assert said["token_ids"] == ids[1.7] != ids[1]
    assert run_json(capfd, folder, *options, "--repetition-penalty", 1.0)["token_ids"] == ids[1]
    path.write_text(json.dumps({"eos_token_id": "x"}))
    assert main(["run", str(folder), *map(str, options)]) == 3
    line = (
        f'moectl: transformers cannot use {path}: eos_token_id "x": it must be a token id, or a '
        "list of them\n"
    )
    said = capfd.readouterr()
    assert (said.out, problems(said.err)) == ("", line)


def test_chat_answers_every_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-new-tokens", 5, "--greedy")
    first = run_json(capfd, model, "--prompt", "one\n\n", *options)["text"]
    second = run_json(capfd, model, "--prompt", f"one\n\n{first.strip()}\n\ntwo\n\n", *options)[
        "text"
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  two \n"))
    assert main(["run", str(model), "--chat", *map(str, options)]) == 0
    said = capfd.readouterr()
    assert said.out == f"{first}\n{second}\n"
    assert "note: the tokenizer has no chat template" in said.err.splitlines()[-1]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    # without a prompt it chats
    assert main(["run", str(model), "--verbose", *map(str, options)]) == 0
    said = capfd.readouterr()
    assert said.out.startswith(f"{first}\n{second}\n\nCounters") and said.out.count("Receipt") == 1
    assert said.err.count(" tokens/s, first ") == 2


def test_words_that_are_no_turns(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (str(model), "--max-new-tokens", "5", "--greedy")
    said = []
    for turns in ("one\n", "two\n/clear\n/stat\n/help\none\n/stats\n/exit\nthree\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
        assert main(["run", *options]) == 0
        said.append(capfd.readouterr())
    alone, after = said
    text, _, counters = after.out.partition("Counters")
    assert text.endswith(alone.out) and "│ all " in counters
    err = after.err.splitlines()
    assert "unknown command '/stat'; did you mean /stats?" in err
    assert [line.split()[0] for line in err if line.startswith("/")] == [
        "/system",
        "/retry",
        "/save",
        "/stats",
        "/clear",
        "/help",
        "/exit",
    ]
    assert " tokens/s, first " in err[-1]


@pytest.mark.parametrize("options", [("--prompt", PROMPT), ()])
def test_ctrl_c_ends_an_answer(
    options: tuple[str, ...],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In a chat the conversation goes on; otherwise what was generated is told."""

    class Interrupted(io.StringIO):
        is_over = False

        def flush(self) -> None:
            if not self.is_over and len(self.getvalue()) == 3:
                self.is_over = True
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", out := Interrupted())
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n/help\n"))
    trace = ("--trace", "never.parquet") if options else ()
    code = main(
        ["run", str(model), *options, *trace, "--max-new-tokens", "200", "--greedy", "--ignore-eos"]
    )
    err = capfd.readouterr().err.splitlines()
    assert out.getvalue().rstrip().isprintable() and len(out.getvalue()) < 10
    if options:
        assert code == 130 and err[-1] == "moectl: interrupted"
        assert (
            err[-2] == "never.parquet was not written: a trace is kept of whole answers"
            and "tokens/s" in err[-3]
        )
        assert not Path("never.parquet").exists()
    else:
        assert code == 0 and err[-1].startswith("/exit")


@pytest.mark.parametrize("preset", ["specmd", "near"])
def test_a_trace_replays_to_the_same_counters(
    preset: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.parquet"
    options = ("--budget", "25%", "--prompt", PROMPT, "--max-new-tokens", 12, "--window", "20KiB")
    said = run_json(capfd, model, "--preset", preset, *options, "--trace", path)
    receipt = said["receipt"]
    controller = build_controller(
        build(receipt["policies"]),
        open_model(str(model)).shape,
        num_slots=receipt["slots"],
        scope=Scope(receipt["scope"]),
        window=receipt["prefetch_window_bytes"],
        artefacts=Artefacts(),
    )
    replay(read_parquet(path), controller)
    assert controller.counters.by_layer() == said["by_layer"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.parquet"]


def process(*arguments: object, **options: object) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "moectl", *map(str, arguments)], env=env, **options
    )


def test_advice_of_libraries_stays_out_of_sight(model: Path, tmp_path: Path) -> None:
    """By default transformers prints advice on this model and progress bars while it loads."""
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "generation_config.json"
    advised = json.loads(path.read_text()) | {
        "temperature": 0.6,
        "top_k": 20,
        "max_length": 12,
        "bos_token_id": 300,
    }
    del advised["pad_token_id"]
    path.write_text(json.dumps(advised))
    running = process(
        "run", folder, "--prompt", PROMPT, "--max-new-tokens", 4, "--greedy", "--json",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    out, err = running.communicate()
    assert (running.returncode, err) == (0, b"")
    assert len(json.loads(out)["token_ids"]) == 4


def test_a_reader_that_goes_away_ends_it_quietly(model: Path, tmp_path: Path) -> None:
    running = process(
        "run", model, "--prompt", PROMPT, "--max-new-tokens", 200, "--ignore-eos",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    assert running.stdout.read(3)
    running.stdout.close()
    assert running.stderr.read().startswith(b"Loading ")
    assert running.wait() == 0


@pytest.fixture(scope="module")
def quantised(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model and a store with its replicas."""
    store = tmp_path_factory.mktemp("quantised") / "moe.duckdb"
    options = (
        "--samples",
        "2",
        "--length",
        "64",
        "--recipe",
        "refined",
        "--jobs",
        "1",
        "--store",
        str(store),
    )
    assert main(["quantize", str(checkpoint("olmoe")), *options]) == 0
    return checkpoint("olmoe"), store


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (("--preset", "context-aware", "--avg-bits", "3"), "near"),
        (("--preset", "shadow"), "low"),
        (("--preset", "uniform-bits"), "low"),
        (("--preset", "hobbit"), "fetched"),
        (("--miss", "fetch_lowest"), "fetched"),
        (("--miss", "fetch_priority:bits=2"), "fetched"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_receipt_and_counters_name_the_bits(
    options: tuple[str, ...],
    at: str,
    quantised: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, store = quantised
    capfd.readouterr()
    common = (
        "--store",
        store,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        12,
        "--greedy",
        "--ignore-eos",
    )
    said = run_json(capfd, model, *options, "--budget", "25%", *common)
    counters = said["counters"]
    replicas = said["receipt"]["replicas"]
    assert len(said["token_ids"]) == 12 and counters[at] > 0
    assert sum(counters[name] for name in AT_BITS.values()) > 0
    assert replicas["kernel"].startswith("numba")
    if at == "low":
        assert counters["exposed_ms"] == 0 and sum(replicas["resident"].values()) == 16
        assert said["receipt"]["fast_bytes"] <= 0.25 * 16 * said["receipt"]["expert_bytes"]
    else:
        assert replicas["slow_tier_bits"]


def test_a_run_learns_maps_and_the_next_one_uses_them(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "moe.duckdb"
    options = [
        str(model),
        "--preset",
        "fmoe",
        "--learn",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "6",
        "--ignore-eos",
    ]
    for number, held in ((1, 6), (2, 12)):
        assert main(["run", *options, "--store", str(store), "--json"]) == 0
        said = capfd.readouterr()
        assert json.loads(said.out)["receipt"]["maps"]["learned_iterations"] == 6
        assert said.err == f"learned from 6 iterations: run {number} of {store} holds {held} maps\n"
    assert (
        main(
            [
                "run",
                *(option for option in options if option != "--learn"),
                "--store",
                str(store),
                "--json",
            ]
        )
        == 0
    )
    said = capfd.readouterr()
    assert json.loads(said.out)["receipt"]["maps"]["held"] == 12 and not said.err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (
            ("--preset", "specmd", "--learn"),
            2,
            "--learn adds to expert maps, and no policy chosen here uses any",
        ),
        (
            ("--preset", "fmoe"),
            5,
            "run `moectl build-maps` on this model, or begin with none by --learn",
        ),
        (
            ("--preset", "fmoe", "--learn", "--store", "nowhere/moe.duckdb"),
            3,
            "there is no folder nowhere",
        ),
    ],
)
def test_what_cannot_learn(
    options: tuple[str, ...],
    code: int,
    says: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(model), "--prompt", PROMPT, "--max-new-tokens", "2", *options]) == code
    said = capfd.readouterr()
    assert says in said.err and problems(said.err).count("\n") == 1 and not list(tmp_path.iterdir())
