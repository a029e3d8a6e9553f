"""`moectl advise`: fifteen lines in which each number has its ground, flags by engine, what is
turned off, counterfactuals, and a user's mistakes."""

import re
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadUsage
from artifacts.traces.parquet import write_parquet
from artifacts.traces.trace import DECODE, Trace
from moectl.cli import main
from moectl.commands.start.advise.answer import lines
from moectl.commands.start.advise.choosing import Advice, advise_on, opened_trace
from moectl.commands.start.advise.engines import ENGINES, ExpertPlacement, engine_of
from moectl.commands.start.advise.predicting import (
    RateSpread,
    Reached,
    drafted,
    predict,
    tried_rate,
)
from moectl.commands.start.advise.what_if import changes_of, told
from moectl.commands.start.plan.fitting import PlanRequest
from moectl.commands.start.plan.needs import needs_of
from moectl.commands.start.plan.place import PlanPlace
from tests.helpers import gguf_files

LLAMA = engine_of("llama.cpp")


def request(model: str = "gpt-oss-20b", machine: str = "rtx5070", **sizes: str) -> PlanRequest:
    return PlanRequest(model, PlanPlace.find(sizes.get("vram"), machine, ram="64GB"))


@pytest.fixture(scope="module")
def advice() -> Advice:
    return advise_on(request(), LLAMA)


@pytest.mark.parametrize(
    ("engine", "model", "flags"),
    [
        (
            "llama.cpp",
            "gpt-oss-20b",
            r"llama-server -hf ggml-org/gpt-oss-20b-GGUF -ngl 99 -cmoe -lm none "
            r"--moe-cache-mib \d+ -c 4096",
        ),
        (
            "llama.cpp",
            "qwen3.8-flash-next",
            r"-hf unsloth/\S+:IQ3_XXS .*--moe-cache-cpu-share 0.5 --spec-type draft-mtp "
            "--spec-draft-n-max 1",
        ),
        ("strata", "gpt-oss-20b", r"--native ggml-org/gpt-oss-20b-GGUF --expert-cache auto"),
        ("freetoken", "gpt-oss-20b", r"ft serve --model openai/gpt-oss-20b --moe-strategy offload"),
        ("ktransformers", "gpt-oss-20b", r"--kt-num-gpu-experts 22 --kt-expert-placement-strategy"),
        ("moectl", "gpt-oss-20b", r"moectl run openai/gpt-oss-20b --budget 70.2% --eviction class"),
    ],
)
def test_fifteen_lines_with_grounds_and_the_flags_of_the_engine(
    engine: str, model: str, flags: str
) -> None:
    said = list(lines(advise_on(request(model), ENGINES[engine])))

    assert len(said) <= 15 and max(map(len, said)) <= 200, said
    begun = {line.partition(":")[0] for line in said[1:]}
    grounds = {"misses", "times", "drafts", "flags and rules"}
    assert {"speed", "placement", "cache", "prediction", "quant", "flags"} | grounds <= begun
    assert re.search(flags, next(line for line in said if line.startswith("flags: ")))
    is_own = model == "gpt-oss-20b"
    assert ("the nearest at hand" in "".join(said)) is not is_own
    assert ("at worst wanted evenly" in "".join(said)) is not is_own


def test_another_models_trace_stands_for_as_many_bytes_as_the_model_loads() -> None:
    asked = request("qwen3.8-flash-next")
    advice = advise_on(asked, LLAMA)
    shape = advice.needs.model.shape
    loading = ExpertPlacement(cache_nbytes=shape.nbytes // 5, near_share=0.0)
    found = predict(advice.needs, advice.machine, loading, LLAMA, advice.trace)

    wanted_nbytes = shape.num_layers * shape.top_k * shape.expert_nbytes
    assert found.loaded_nbytes == pytest.approx((1 - found.hit_rate) * wanted_nbytes, rel=0.001)


def test_what_fits_needs_no_cache() -> None:
    said = list(lines(advise_on(request(machine="rtx5090"), LLAMA)))

    assert "cache: off: all experts fit without one" in said
    assert "--moe-cache" not in "".join(said) and "nothing is loaded" in "".join(said)


def test_a_cache_that_loses_is_turned_off(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens, layers = 60, 24
    experts = rng.random((tokens * layers, 32)).argsort(axis=1)[:, :4].astype(np.uint16)
    rows = np.repeat(np.arange(tokens, dtype=np.int32), layers)
    layer = np.tile(np.arange(layers, dtype=np.int32), tokens)
    nothing = np.zeros_like(rows)
    weights = np.full(experts.shape, 0.25, np.float32)
    phase = np.full(len(rows), DECODE, np.uint8)
    path = tmp_path / "even.parquet"
    write_parquet(Trace(nothing, rows, phase, layer, rows, experts, weights), path)

    advice = advise_on(request(machine="5gbps", vram="8GB"), LLAMA, str(path))
    said = "\n".join(lines(advice))

    assert advice.placement.share and not advice.placement.cache_nbytes
    assert "cache: turn it off: on, with" in said and "--n-cpu-moe" in said
    assert "replay of even.parquet, 60 tokens" in said


def test_a_header_is_enough_and_its_own_quant_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "Tiny-Q8_0.gguf"
    gguf_files.write("qwen3_moe", path, gguf_files.every("Q8_0"))

    said = list(lines(advise_on(request(str(path)), LLAMA)))

    assert f"flags: llama-server -m {path} -ngl 99 -c 4096" in said
    assert any(line.startswith("quant: as published, 8.5 bits") for line in said)


def test_the_interval_holds_the_prediction_and_follows_the_rates(advice: Advice) -> None:
    found = advice.prediction
    assert found.low < found.tokens_per_second < found.high
    assert 0 < found.of_limit < 1

    exact = Reached(*(RateSpread(1.0, 1.0, 1.0),) * 3)
    machine = advice.request.place.machine
    trace = opened_trace(None, advice.needs)
    sure = predict(advice.needs, machine, advice.placement, LLAMA, trace, reached=exact)
    assert sure.high / sure.low < 1.1 and sure.tokens_per_second > found.tokens_per_second


def test_more_of_anything_is_never_slower(advice: Advice) -> None:
    needs = needs_of("gpt-oss-20b", None)
    trace = opened_trace(None, needs)
    machine = advice.request.place.machine

    def rate(share: float) -> float:
        placement = ExpertPlacement(
            cache_nbytes=int(share * needs.model.shape.nbytes), near_share=0.0
        )
        return tried_rate(needs, machine, placement, LLAMA, trace)

    rates = [rate(share) for share in (0.125, 0.25, 0.5, 0.75, 1.0)]
    assert rates == sorted(rates)
    always = drafted(trace, 1, 1.0)
    assert tried_rate(needs, machine, ExpertPlacement(1.0), LLAMA, always) > advice.drafts[1]


def test_what_if_tells_what_buys_most() -> None:
    text = "+8GiB vram, ddr5-6000, pcie4, quant IQ3_XXS, mtp"
    said = list(told(changes_of(text), request(), LLAMA, None))

    rates = {line[:20].strip(): float(line[20:29]) for line in said[1:7]}
    now = rates.pop("as it is")
    assert list(rates) == text.split(", ")
    assert rates["+8GiB vram"] >= now and rates["ddr5-6000"] >= now and rates["pcie4"] <= now
    assert said[7] == f"buys most: {max(rates, key=rates.get)}"
    assert "loses: not measured" in said[5] and len(said) <= 15


@pytest.mark.parametrize("text", ["", "+8xB vram", "quant Q9", "ddr3-1600", "a faster one"])
def test_what_if_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(BadUsage):
        changes_of(text)


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--machine", "rtx9999"], 2, "rtx9999"),
        (["--machine", "rtx5070", "--for", "ollama"], 2, "unknown engine 'ollama'"),
        (["--machine", "rtx5070", "--trace", "none.parquet"], 3, "none.parquet"),
    ],
)
def test_a_mistake_gives_one_line(
    options: list[str], code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "gpt-oss-20b", *options]) == code

    out, err = capfd.readouterr()
    assert not out and len(err.splitlines()) == 1 and told in err
