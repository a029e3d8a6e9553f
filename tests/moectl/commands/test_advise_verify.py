"""`moectl advise --verify`: the speed of llama.cpp on a CPU, by the wheel or from a log, beside
what was predicted, and kept."""

import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest

from artifacts.errors import BadInput
from artifacts.store.store import Store
from artifacts.store.verifications import TABLE
from moectl.cli import main
from moectl.commands.start.advise.llama_cpu import (
    FURTHER_THREAD,
    LAYER_S,
    NS_PER_WEIGHT,
    WORD_S,
    CpuWork,
    tokens_per_second,
)
from moectl.commands.start.advise.verifying import from_log
from tools.make.gguf_models import FITTED_ON, make

BENCH = {
    "build_number": 12569,
    "n_gen": 64,
    "n_gpu_layers": 0,
    "n_prompt": 0,
    "n_threads": 2,
    "samples_ts": [3000.0, 3100.0, 3200.0],
}
LOG = """prompt eval time =  10.00 ms /  16 tokens (  0.62 ms per token,  1600.00 tokens per second)
       eval time =  32.00 ms /  64 tokens (  0.50 ms per token,  2000.00 tokens per second)
"""
ANSWER = json.dumps({"timings": {"predicted_per_second": 51.5}})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make(FITTED_ON["tiny"], path)
    return path


def verified(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["advise", *map(str, arguments)]) == 0
    return capfd.readouterr().out


def test_a_token_takes_the_time_of_its_weights(tiny: Path) -> None:
    model = FITTED_ON["tiny"]
    hidden = model.hidden
    attention = 2 * model.layers * (hidden + 128) * hidden
    experts = 3 * model.layers * model.top_k * hidden * model.intermediate
    weights = attention + experts + model.vocabulary * hidden
    work = CpuWork.of(tiny)
    assert work.weights == {"Q8_0": weights}
    assert work.nbytes == weights * 34 / 32
    rest_s = model.layers * LAYER_S + model.vocabulary * WORD_S
    products_s = weights * NS_PER_WEIGHT["Q8_0"] / 1e9
    expected = 1 / (products_s / (1 + FURTHER_THREAD) + rest_s)
    assert tokens_per_second(work, 2) == pytest.approx(expected)
    assert tokens_per_second(work, 2, 0.1) == pytest.approx(1 / (work.nbytes / 1e8 + rest_s))
    with pytest.raises(BadInput, match="no time of a weight is known for TQ1_0"):
        tokens_per_second(CpuWork({"TQ1_0": 1.0}, 1, 1, 1.0), 1)


@pytest.mark.parametrize(
    ("text", "rates", "threads"),
    [
        (json.dumps([BENCH, BENCH | {"n_prompt": 512, "n_gen": 0}]), (3000, 3100, 3200), 2),
        (LOG, (2000,), 1),
        (ANSWER, (51.5,), 1),
    ],
)
def test_logs(tmp_path: Path, text: str, rates: tuple[float, ...], threads: int) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    found = from_log(log, 1)
    assert (found.rates, found.threads) == (rates, threads)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "has no time of decoding"),
        ('[{"n_prompt": 0}]', "not what `llama-bench -o json` prints"),
        ("[]", "run it with -p 0 -n 64"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    with pytest.raises(BadInput, match=told):
        from_log(log, 1)


def test_after_ten_the_interval_is_theirs(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "bench.json"
    log.write_text(json.dumps([BENCH]))
    given = (tiny, "--engine-log", log, "--store", tmp_path / "moe.duckdb")
    said = verified(capfd, *given)
    assert "b12569 gave 3100 (CPU, 2 threads; median of 3, spread 6%)" in said
    assert "assumed until 10 verifications, this is 1)" in said
    with Store.open(tmp_path / "moe.duckdb") as store:
        [run] = store.runs(table=TABLE)
        rows = store.read(TABLE, run.run_id)
        store.write_run(run.info, {TABLE: pa.concat_tables([rows] * 9)})
    assert "(3100 to 3100, from 10 verifications)" in verified(capfd, *given)


def test_a_log_of_a_gpu_is_compared_with_the_advice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "bench.json"
    log.write_text(json.dumps([BENCH | {"n_gpu_layers": 99, "samples_ts": [100.0]}]))
    place = ("gpt-oss-20b", "--machine", "rtx5070", "--ram", "64GB", "--engine-log", log)
    said = verified(capfd, *place, "--store", tmp_path / "moe.duckdb")
    assert "predicted 112 tokens/s (81.7 to 140, assumed" in said
    assert "gave 100 (as advised; median of 1, spread 0%): error +11.8%" in said
    advice = (*place[:-2], "--store", tmp_path / "moe.duckdb")
    assert "between 81.7 and 140" in verified(capfd, *advice)
    with Store.open(tmp_path / "moe.duckdb") as store:
        [run] = store.runs(table=TABLE)
        rows = store.read(TABLE, run.run_id)
        store.write_run(run.info, {TABLE: pa.concat_tables([rows] * 9)})
    said = verified(capfd, *advice)
    assert "112 tokens/s, between 100 and 100" in said and len(said.splitlines()) <= 15
    assert "interval: from 10 verifications, median error 11.8%" in said


@pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="llama.cpp is not installed (extra: peers)"
)
def test_the_wheel_is_run(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = verified(capfd, tiny, "--verify", "--threads", "1", "--store", tmp_path / "moe.duckdb")
    assert said.startswith("verified: predicted ")
    assert "(CPU, 1 threads, processor time; median of 5, " in said


def test_what_cannot_be_verified_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "gpt-oss-20b", "--verify"]) == 2
    assert "gpt-oss-20b is no GGUF file" in capfd.readouterr().err
    assert main(["advise", "gpt-oss-20b", "--verify", "--for", "strata"]) == 2
    assert "moectl runs no strata: give its log" in capfd.readouterr().err
