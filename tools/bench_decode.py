"""Decoding at batch 1 with every expert resident: moectl beside the experts implementations of transformers.

    python -m tools.bench_decode --threads 1

Every implementation decodes the same tokens with the same weights in one process, in rounds that take turns; a ratio is
that of one round, so that what else the machine does meanwhile falls on all alike. Without `--model` two are measured:
the bundled one, and a random one of OLMoE's shape that is written to a temporary folder first (1 GB).
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moectl.bundled import demo_model
from moectl.render import Sheet, show_sheet
from runtime.model import open_model
from runtime.session import Session, Settings

STOCK = ("eager", "grouped_mm", "batched_mm")
OURS = "moectl"
PROMPT = 16  # tokens
OLMOE_SHAPED = ("--layers", "16", "--experts", "64", "--top-k", "8", "--hidden", "512", "--intermediate", "256")

log = logging.getLogger("bench_decode")


@dataclass(frozen=True, slots=True)
class Contender:
    """A model and what makes it run its experts in one way."""

    name: str
    model: PreTrainedModel
    select: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One implementation: median ms of a token, and its ratio to eager, median and quartiles over the rounds."""

    name: str
    ms_per_token: float
    ratio: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Report:
    """One model: the implementations in the order of STOCK, then ours; `controller_us` is the time of one decision."""

    model: str
    dtype: str
    num_layers: int
    num_experts: int
    top_k: int
    results: tuple[Result, ...]
    controller_us: float


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    reports = []
    for name, opening in _models(options.model):
        with opening as folder:
            log.info("%s: %d rounds of %d tokens", name, options.rounds, options.tokens)
            reports.append(bench(name, folder, rounds=options.rounds, tokens=options.tokens))
        show_sheet(sheet(reports[-1], threads=options.threads, rounds=options.rounds, tokens=options.tokens))
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")


def bench(name: str, folder: Path, *, rounds: int, tokens: int) -> Report:
    """Measure every implementation on the checkpoint in `folder`, on the CPU."""
    stock = plain_model(folder)
    with Session(open_model(str(folder), dtype=stock.dtype), Settings(preset="full")) as session:
        contenders = [Contender(each, stock, partial(stock.set_experts_implementation, each)) for each in STOCK]
        contenders.append(Contender(OURS, session.opened.model, lambda: None))
        ids = torch.from_numpy(np.random.default_rng(0).integers(3, stock.config.vocab_size, (1, PROMPT + tokens)))
        seconds = run_rounds(contenders, ids, rounds=rounds)
        shape = session.opened.shape
        return Report(
            model=name,
            dtype=str(stock.dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            results=tuple(_result(contender.name, seconds) for contender in contenders),
            controller_us=controller_seconds(session, ids) * 1e6,
        )


def plain_model(
    folder: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The model as transformers loads it, its weights copied: as views of a file they lie on borders that cost time."""
    options = {"experts_implementation": "eager"} | ({"dtype": dtype} if dtype else {})
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval().to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def run_rounds(contenders: list[Contender], ids: torch.Tensor, *, rounds: int) -> dict[str, list[float]]:
    """Median seconds of a token per contender and round; a round before the first warms up. Each round begins with
    another contender."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds + 1):
        start = turn % len(contenders)
        for contender in contenders[start:] + contenders[:start]:
            contender.select()
            steps = decode_seconds(contender.model, ids)
            if turn:
                seconds[contender.name].append(statistics.median(steps))
    return seconds


@torch.inference_mode()
def decode_seconds(
    model: PreTrainedModel, ids: torch.Tensor, *, after_prompt: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each decode step over `ids` [1, PROMPT + tokens], whatever the model would say itself."""
    past = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
    after_prompt()
    seconds = []
    for position in range(PROMPT, ids.shape[1]):
        token = ids[:, position : position + 1]
        begin_s = time.perf_counter()
        past = model(input_ids=token, past_key_values=past, use_cache=True).past_key_values
        if ids.is_cuda:
            torch.cuda.current_stream(ids.device).synchronize()
        seconds.append(time.perf_counter() - begin_s)
    return seconds


def controller_seconds(session: Session, ids: torch.Tensor, *, repeats: int = 20) -> float:
    """Median seconds in which the controller decides one layer of one token, everything resident."""
    steps = []
    session.watcher.on_step = steps.append
    decode_seconds(session.opened.model, ids)
    session.watcher.on_step = None
    decode = [step for step in steps if len(step.selected) == 1]
    seconds = []
    for step in decode * repeats:
        begin_s = time.perf_counter()
        session.controller.step(step)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


def sheet(report: Report, *, threads: int, rounds: int, tokens: int) -> Sheet:
    columns = ("experts implementation", "ms/token", "ratio to eager", "quartiles of the ratio")
    rows = [
        (result.name, f"{result.ms_per_token:.2f}", f"{result.ratio:.3f}", f"{result.lower:.3f} to {result.upper:.3f}")
        for result in report.results
    ]
    title = (
        f"{report.model}: {report.num_layers} layers, {report.num_experts} experts, top-{report.top_k}, {report.dtype}"
    )
    note = (
        f"medians over {rounds} interleaved rounds of {tokens} tokens, batch 1, every expert resident, torch threads: "
        f"{threads}; the controller decides a layer in {report.controller_us:.0f} us"
    )
    return Sheet(title, columns, rows, note)


def _result(name: str, seconds: dict[str, list[float]]) -> Result:
    ratios = [own / eager for own, eager in zip(seconds[name], seconds["eager"], strict=True)]
    lower, ratio, upper = np.percentile(ratios, [25, 50, 75]).tolist()
    return Result(name, statistics.median(seconds[name]) * 1e3, ratio, lower, upper)


def _models(folders: list[Path]) -> Iterator[tuple[str, AbstractContextManager[Path]]]:
    """A name, and what opens the folder, of each model to measure."""
    for folder in folders:
        yield folder.name, nullcontext(folder)
    if folders:
        return
    if (demo_model() / "config.json").is_file():
        yield "the bundled model", nullcontext(demo_model())
    yield "random, shaped as OLMoE", random_model(*OLMOE_SHAPED)


@contextmanager
def random_model(*shape: str) -> Iterator[Path]:
    """A checkpoint of random weights in a temporary folder; `shape` as tools.make_checkpoint takes it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "tools.make_checkpoint", folder, *shape], check=True, capture_output=True)
        yield Path(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a checkpoint; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=24, help="decoded by each implementation in each round")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args()
    for folder in options.model:
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} is no checkpoint: it holds no config.json")
    return options


if __name__ == "__main__":
    main()
