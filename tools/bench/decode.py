"""Measures every table of docs/lab/performance.md, on any machine.

    python -m tools.bench.decode                                  prints all of them
    python -m tools.bench.decode --write docs/lab/performance.md      puts them there, and their ratios beside it
    python -m tools.bench.decode --check                          exits 1 where a ratio is worse than the committed one

Sections: `resident`, every expert resident, beside transformers' implementations and llama.cpp;
`controller`, microseconds of a decision; `link`, a token over an emulated link, live and simulated;
`prefill`, a prompt at a quarter of the experts; `disk`, beside Accelerate; `threads`, every expert
resident on several. Contenders alternate in rounds and ratios are taken within a round, so that
other load of the machine affects all alike. Two models are measured, the bundled one and a random
one of OLMoE's shape that is written to a temporary folder first (0.8 GB); `resident` and `threads`
measure two layers of OLMoE's size (1.7 GB). `--model` names others.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from artifacts.errors import BadInput
from artifacts.modelshapes.known import MODELS, ModelShape
from artifacts.traces.trace import Trace
from moectl.bundled import demo_model
from moectl.show.render import Sheet, show_sheet
from tools import ROOT
from tools.arguments import parser_of
from tools.bench import performance
from tools.bench.decoding import link as bench_link
from tools.bench.decoding import prefill as bench_prefill
from tools.bench.decoding import resident as bench_resident
from tools.bench.decoding import threads as bench_threads
from tools.bench.disk import accelerate as bench_disk
from tools.bench.performance import Ratio, Section, Table
from tools.bench.traces import controller as bench_controller

BUNDLED = "the bundled model"
RANDOM = "random, OLMoE's shape"
SIZED = "random, two layers of OLMoE's size"
PAGE = ROOT / "docs" / "lab" / "performance.md"
LINKS = {
    BUNDLED: "300MB/s"
}  # else the default below, where waiting and computing take about as long
LINK = "3GB/s"
DECIDED = (
    "olmoe-1b-7b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
)  # decisions are timed in the shapes of these

log = logging.getLogger("bench_decode")


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    try:
        committed = performance.read_ratios(options.page) if options.check else {}
        if options.write:
            performance.check_places(options.write, options.only)
        told = performance.conditions(_command())  # of the load too: that of other work
        sections = list(_measured(options))
        if options.write:
            performance.write(options.write, sections, told)
    except BadInput as problem:
        print(problem, file=sys.stderr)
        return 3
    found = {name: ratio for section in sections for name, ratio in section.ratios.items()}
    lines = performance.worse(found, committed)
    for line in lines:
        print(f"worse: {line}")
    if options.check:
        print(f"{len(found)} ratios, of which {len(lines)} are worse than the committed ones")
    return 1 if lines else 0


def _measured(options: argparse.Namespace) -> Iterator[Section]:
    with _models(options) as models:
        for name in options.only:
            log.info("%s ...", name)
            section = SECTIONS[name](models, options)
            for table in section.tables:
                show_sheet(Sheet(table.title, table.columns, table.rows, table.note))
            yield section


def _resident(models: dict[str, Path], options: argparse.Namespace) -> Section:
    if options.model:
        return bench_resident.measure(models, rounds=options.rounds, tokens=options.tokens)
    with bench_resident.random_model(*bench_resident.OLMOE_SIZED) as folder:
        models = models | {SIZED: folder}
        return bench_resident.measure(models, rounds=options.rounds, tokens=options.tokens)


def _threads(models: dict[str, Path], options: argparse.Namespace) -> Section:
    known = {"rounds": max(2, options.rounds // 2), "tokens": options.tokens}
    if options.model:
        return bench_threads.measure(options.model[0].name, options.model[0], **known)
    with bench_resident.random_model(*bench_resident.OLMOE_SIZED) as folder:
        return bench_threads.measure(SIZED, folder, **known)


def _controller(models: dict[str, Path], options: argparse.Namespace) -> Section:
    """Decisions of presets on synthetic traces in the shapes of three models; ratios are to
    on-demand."""
    return Section("controller", [_decisions(MODELS[name], options.rounds) for name in DECIDED])


def _decisions(model: ModelShape, effort: int) -> Table:
    shape = model.shape
    is_first = model is bench_controller.OLMOE
    names = (*bench_controller.LOSSLESS, bench_controller.TUNED)
    trace = bench_controller.foreseeing(160 * effort // shape.num_layers, model)
    rounds = [[_steps_us(name, trace, model) for name in names] for _ in range(max(2, effort // 2))]
    middles = np.median(rounds, axis=2)  # [rounds, presets]
    rows = []
    ratios = {}
    for name, own, times in zip(
        names, np.swapaxes(rounds, 0, 1), (middles / middles[:, :1]).T, strict=True
    ):
        lower, middle, upper = np.percentile(own, [25, 50, 75]).tolist()
        rows.append((name, f"{middle:.1f}", f"{lower:.1f} to {upper:.1f}"))
        least, usual, most = np.percentile(times, [25, 50, 75]).tolist()
        ratios[name if is_first else f"{name}, {model.name}"] = Ratio(usual, least, most)
    columns = ("preset", "us a step", "quartiles")
    note = f"{len(rounds)} rounds of {len(trace):,} steps of one token, budget 25 %"
    title = (
        f"{shape.num_layers} layers, {shape.top_k} of {shape.num_experts} experts ({model.name})"
    )
    return Table(title, columns, rows, note, ratios)


def _steps_us(name: str, trace: Trace, model: ModelShape) -> list[float]:
    """Microseconds of the steps without the first third."""
    owner, matching = bench_controller.controller(name, trace, model)
    steps_us = bench_controller.timed(trace, owner, matching).steps_us
    return steps_us[len(steps_us) // 3 :]


def _link(models: dict[str, Path], options: argparse.Namespace) -> Section:
    links = {name: LINKS.get(name, LINK) for name in models}
    known = {
        "rounds": max(2, options.rounds // 3),
        "tokens": options.tokens,
        "effort": bench_link.EFFORT,
    }
    return bench_link.measure(models, link=links, **known)


def _prefill(models: dict[str, Path], options: argparse.Namespace) -> Section:
    return bench_prefill.measure(models, rounds=max(2, options.rounds // 2), length=options.prompt)


def _disk(models: dict[str, Path], options: argparse.Namespace) -> Section:
    """Each way in a process of its own, on the model in Accelerate's layout."""
    rounds = max(1, options.rounds // 5)
    tokens = max(4, options.tokens // 2)
    with bench_disk.checkpoint(None) as folder:
        found = bench_disk.rows(folder, rounds=rounds, tokens=tokens)
    sheet = bench_disk.sheet(found, rounds=rounds, tokens=tokens)
    ratios = {}
    for row in found:
        if row.way.startswith(bench_disk.OURS):
            for which, times in (("cold", row.cold_times), ("warm", row.warm_times)):
                middle, least, most = times
                ratios[f"{row.way}, {which}"] = Ratio(1 / middle, 1 / most, 1 / least)
    return Section("disk", [Table(sheet.title, sheet.columns, sheet.rows, sheet.note, ratios)])


SECTIONS: dict[str, Callable[[dict[str, Path], argparse.Namespace], Section]] = {
    "resident": _resident,
    "controller": _controller,
    "link": _link,
    "prefill": _prefill,
    "disk": _disk,
    "threads": _threads,
}
OF_MODELS = {"resident", "link", "prefill"}  # the other sections name their own models


@contextmanager
def _models(options: argparse.Namespace) -> Iterator[dict[str, Path]]:
    """Folders of the measured models, by name."""
    if options.model or not OF_MODELS.intersection(options.only):
        yield {folder.name: folder for folder in options.model}
        return
    with bench_resident.random_model(*bench_resident.OLMOE_SHAPED) as folder:
        yield {BUNDLED: demo_model(), RANDOM: folder}


def _command() -> str:
    return " ".join(["python -m tools.bench.decode", *sys.argv[1:]])


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        rounds=(12, "of `resident`; others take a share of it"),
        tokens=(24, "decoded in each round"),
        prompt=(512, "tokens of a prompt in `prefill`"),
        write=(Path, "put the tables into this page"),
        check=(False, "compare with the ratios of a page"),
        page=(PAGE, "that page"),
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections"
    )
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a checkpoint; may be repeated"
    )
    options = parser.parse_args()
    for folder in options.model:
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} is no checkpoint: it holds no config.json")
    return options


if __name__ == "__main__":
    sys.exit(main())
