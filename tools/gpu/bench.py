"""Offloading on a GPU beside the lower bound by bytes, plain transformers and Accelerate: JSON and
a table.

    python -m tools.gpu.bench --out report.json --table table.md

Random weights of two published shapes, routing skewed and alike from token to token
(tools.gpu.models), budgets from 5 to 100 %. It ends within `--limit` seconds; rows that are not
measured by then say so. Every row is written at once. `--tiny` runs the same with very small models
on any machine, over an emulated link without a GPU; its figures do not apply to a GPU.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from runtime.model.open import MoeModel
from runtime.session.session import Settings
from runtime.session.settings import DEVICE
from tools.arguments import parser_of
from tools.gpu import models, sparse
from tools.gpu import rows as gpu_rows
from tools.gpu.check import forget, gpu, versions
from tools.gpu.futures import ORACLE, Forecast, known_future, other_texts, tuned
from tools.gpu.groups import tell
from tools.gpu.models import SHAPES
from tools.gpu.rows import Rates, Row, Text

PRESETS = ("on-demand", "mixtral-offloading", "near")
BUDGETS = ("50%", "25%", "12.5%", "5%")
AIMED_AT = "25%"  # where perfect prefetching, tuned policies and Accelerate run
EMULATED_GBPS = 0.05  # of the emulated link without a GPU; its models are very small
ON_DISK = [name for name, shape in SHAPES.items() if not shape.is_sparse]
NO_TIME = "not measured: out of time"
_COLUMNS = {
    "TTFT ms": ("ttft_ms", 1),
    "TPOT ms": ("tpot_ms", 2),
    "floor ms": ("floor_ms", 2),
    "share of the floor": ("floor_share", 2),
    "predicted ms": ("predicted_ms", 2),
    "hit rate": ("hit_rate", 2),
    "MB moved": ("moved_mb", 1),
    "link used": ("link_utilisation", 2),
    "stall ms": ("stall_ms", 2),
}
"""Of the table: a row's figure, and its digits."""

Run = tuple[str, str, Callable[[], Row]]


def main() -> None:
    options = _options()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not options.tiny:
        sys.exit("no GPU is visible to torch: nothing to measure (--tiny tries the road itself)")
    torch.set_num_threads(options.threads)
    report = run(device, options)
    if options.table:
        options.table.write_text(markdown(report), encoding="utf-8")
    print(markdown(report), file=sys.stderr if options.lines else sys.stdout)


def run(device: str, options: argparse.Namespace) -> dict:
    """Make the report; each row is printed and written at once."""
    begin_s = time.perf_counter()
    each_s = options.limit / len(options.models)
    on_gpu = device != "cpu"
    link = gpu_rows.link_rate(device) if on_gpu else EMULATED_GBPS * 1e9
    rates = Rates(link, gpu_rows.memory_rate(device))
    report = {"gpu": gpu(device), "versions": versions(), "rates": asdict(rates), "models": {}}
    for number, name in enumerate(options.models, 1):
        report["models"][name] = model = {"rows": []}
        deadline_s = begin_s + number * each_s  # time that a model does not use goes to the next
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            work = _rows(
                name, Path(folder), device, rates, options, told=model, deadline_s=deadline_s
            )
            for row in _survived(work):
                model["rows"].append(asdict(row) | {"floor_share": row.floor_share})
                if options.lines:
                    tell(**model["rows"][-1])
                print(f"{name}: {_told(row)}", file=sys.stderr, flush=True)
                report["seconds"] = time.perf_counter() - begin_s
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        forget()
    return report


def _survived(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of one model; if it cannot be made or opened, the last row gives the reason."""
    try:
        yield from rows
    except Exception as error:
        yield gpu_rows.failed("the model itself", "", error)


def _rows(
    name: str,
    folder: Path,
    device: str,
    rates: Rates,
    options: argparse.Namespace,
    *,
    told: dict,
    deadline_s: float,
) -> Iterator[Row]:
    """Rows of plain transformers, then of moectl and Accelerate; facts on the model are added to
    `told`."""
    from runtime.model.open import open_model
    from runtime.tiers.ram import RamStore

    shape = SHAPES[name]
    layers = options.layers or shape.layers
    models.save(shape, folder, layers=layers, device=device, tiny=options.tiny)
    forget()
    opened = open_model(str(folder), device=torch.device(device))
    told |= _about(name, opened, options)
    told["active_nbytes"] = active = gpu_rows.active_nbytes(opened)
    length = options.prompt + options.tokens
    sequences = models.texts(opened.config.vocab_size, count=options.sequences + 1, length=length)
    text = Text(sequences, options.prompt)
    pin = device != "cpu"
    if shape.is_sparse:
        in_ram = sparse.with_experts(opened, pin=pin)
    else:
        yield from _plain(folder, device, text, active, rates, told)
        # measured once, not for every session
        in_ram = replace(opened, store=RamStore(opened.store, pin=pin))
    runs = Runs(name, in_ram, folder, text, rates, device, options, told)
    for row_name, budget, work in runs.all(options.only):
        if time.perf_counter() > deadline_s:
            yield Row(row_name, budget, why_not=NO_TIME)
        else:
            yield replace(gpu_rows.attempt(row_name, budget, work), name=row_name)
        forget()
    opened.store.close()


@dataclass(frozen=True)
class Runs:
    """The measurements of one model by moectl and Accelerate, rows with a target first; `told`
    holds facts on it."""

    name: str
    opened: MoeModel
    folder: Path
    text: Text
    rates: Rates
    device: str
    options: argparse.Namespace
    told: dict

    def all(self, only: str = "") -> list[Run]:
        """Name, budget and function of every row whose name contains `only`."""
        return [run for run in self._all() if only in run[0]]

    def _all(self) -> list[Run]:
        return [
            (
                "moectl, full, the model's own bits",
                "100%",
                partial(self._row, "full", "100%", fused=False),
            ),
            ("moectl, full", "100%", partial(self._row, "full", "100%")),
            ("moectl, perfect prefetching", AIMED_AT, self._oracle),
            ("moectl, tuned", AIMED_AT, self._tuned),
            *(
                []
                if self.device == "cpu"
                else [("moectl, on-demand, the GPU decides", AIMED_AT, self._on_device)]
            ),
            *self._prompts(),
            *(
                (f"moectl, {preset}", budget, partial(self._row, preset, budget))
                for budget in sorted(self.options.budgets, key=AIMED_AT.__ne__)
                for preset in PRESETS
            ),
            *(
                []
                if SHAPES[self.name].is_sparse
                else [("Accelerate, CPU offload", AIMED_AT, self._accelerate)]
            ),
        ]

    @property
    def _link(self) -> str:
        return "auto" if self.device != "cpu" else f"{EMULATED_GBPS}GB/s"

    def _row(self, preset: str, budget: str, *, fused: bool = True) -> Row:
        settings = gpu_rows.settings_of(self.opened, preset, budget, link=self._link, fused=fused)
        row = gpu_rows.session_row(self.opened, settings, self.text, self.rates)
        return replace(row, predicted_ms=self._predicted(settings))

    def _predicted(self, settings: Settings) -> float | None:
        """Return the milliseconds that a replay of the same texts predicts for these settings, with
        times measured here."""
        return self._forecast.predicted_ms(settings)

    @cached_property
    def _forecast(self) -> Forecast:
        return Forecast(self.opened, self.text, self.rates, link=self._link)

    def _oracle(self) -> Row:
        settings = gpu_rows.settings_of(
            self.opened, "on-demand", AIMED_AT, link=self._link, policies=ORACLE
        )
        known = known_future(self.opened, self.text, link=self._link)
        return gpu_rows.session_row(self.opened, settings, self.text, self.rates, artefacts=known)

    def _tuned(self) -> Row:
        others = other_texts(self.text, self.opened.config.vocab_size)
        best = tuned(self.opened, others, self.rates, budget=AIMED_AT, link=self._link).combination
        self.told["tuned"] = best._asdict()
        own = {"policies": best.policies, "scope": best.scope}
        settings = gpu_rows.settings_of(self.opened, "on-demand", AIMED_AT, link=self._link, **own)
        row = gpu_rows.session_row(self.opened, settings, self.text, self.rates)
        return replace(row, predicted_ms=self._predicted(settings))

    def _on_device(self) -> Row:
        settings = gpu_rows.settings_of(
            self.opened, "on-demand", AIMED_AT, link=self._link, decide=DEVICE
        )
        row = gpu_rows.session_row(self.opened, settings, self.text, self.rates)
        # loads and products are kernels of one stream
        return replace(row, stall_ms=None, predicted_ms=self._predicted(settings))

    def _prompts(self) -> Iterator[Run]:
        length = self.options.long_prompt
        count = self.options.sequences + 1
        prompts = models.texts(self.opened.config.vocab_size, count=count, length=length, seed=2)
        for name, preset, budget, fused in (
            ("full, the model's own bits", "full", "100%", False),
            ("full", "full", "100%", True),
            ("on-demand, the model's own bits", "on-demand", AIMED_AT, False),
            ("on-demand", "on-demand", AIMED_AT, True),
        ):
            settings = gpu_rows.settings_of(
                self.opened, preset, budget, link=self._link, fused=fused
            )
            work = partial(gpu_rows.prompt_row, self.opened, settings, prompts, self.rates)
            yield f"prompt of {length}, moectl, {name}", budget, work

    def _accelerate(self) -> Row:
        own = {"device": self.device, "threads": self.options.threads}
        return gpu_rows.accelerate_row(self.opened, self.folder, AIMED_AT, self.text, **own)


def _plain(
    folder: Path, device: str, text: Text, active: int, rates: Rates, told: dict
) -> list[Row]:
    """Rows of every implementation of transformers; statistics of the routing are added to
    `told`."""
    from tools.bench.decoding.resident import STOCK, plain_model

    try:
        model = plain_model(folder, device=device)
        told["routing"] = asdict(models.routing(model, text.sequences[0]))
    except (
        Exception
    ) as error:  # for instance too little memory, with which moectl may run nevertheless
        return [gpu_rows.failed("transformers", "all resident", error)]
    measure = partial(gpu_rows.plain_row, model, text=text, active=active, rates=rates)
    found = [
        gpu_rows.attempt(f"transformers, {way}", "all resident", partial(measure, way))
        for way in STOCK
    ]
    del model, measure
    forget()
    return found


def _about(name: str, opened: object, options: argparse.Namespace) -> dict:
    shape = opened.shape
    return {
        "layers": shape.num_layers,
        "layers_published": SHAPES[name].published,
        "experts": shape.num_experts,
        "top_k": shape.top_k,
        "expert_nbytes": shape.expert_nbytes,
        "prompt": options.prompt,
        "decoded": options.tokens * options.sequences,
    }


def _told(row: Row) -> str:
    times = (("TTFT", row.ttft_ms), ("TPOT", row.tpot_ms))
    told = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times if ms is not None)
    return f"{row.name}, {row.budget}: {row.why_not or told}"


def markdown(report: dict) -> str:
    """A table for each model, with its conditions above it."""
    about = report["gpu"] or {"name": "no GPU, emulated link"}
    rates = report["rates"]
    packages = [f"{name} {version}" for name, version in report["versions"].items() if version]
    lines = [
        f"{about['name']}; link {rates['link'] / 1e9:.1f} GB/s, memory "
        f"{rates['memory'] / 1e9:.0f} GB/s; {', '.join(packages)}"
    ]
    for name, model in report["models"].items():
        lines += ["", _headline(name, model), ""]
        lines.append(f"| | budget | experts by | {' | '.join(_COLUMNS)} |")
        lines.append("|---" * (3 + len(_COLUMNS)) + "|")
        lines += [_line(row) for row in model["rows"]]
    return "\n".join(lines) + "\n"


def _headline(name: str, model: dict) -> str:
    if "experts" not in model:
        return f"**{name}**"
    told = (
        f"**{name}**, random weights, {model['layers']} of {model['layers_published']} layers, "
        f"{model['experts']} experts of {model['expert_nbytes'] / 2**20:.1f} MiB, "
        f"top-{model['top_k']}; prompt of {model['prompt']}, {model['decoded']} tokens decoded."
    )
    if best := model.get("tuned"):
        told += f" Tuned: {', '.join(best.values())}."
    if (said := model.get("routing")) is None:
        return told
    return told + (
        f" Of a token's experts {said['repeated']:.2f} served the token before, "
        f"{said['by_chance']:.2f} by chance; the busiest quarter takes "
        f"{said['busiest_quarter']:.2f} of all choices."
    )


def _line(row: dict) -> str:
    if row["why_not"]:
        return f"| {row['name']} | {row['budget']} | {row['why_not']} |" + " |" * len(_COLUMNS)
    figures = row | {"moved_mb": row["moved_nbytes"] / 1e6}
    cells = [
        "" if figures[key] is None else f"{figures[key]:.{digits}f}"
        for key, digits in _COLUMNS.values()
    ]
    return f"| {' | '.join([row['name'], row['budget'], row['experts'], *cells])} |"


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        out=(Path, "write the JSON report to this file"),
        table=(Path, "write the Markdown table to this file"),
        layers=(int, "of every model, instead of its own number"),
        budgets=(list(BUDGETS), "beside 100%%, the largest first"),
        prompt=(128, "tokens of a prompt"),
        long_prompt=(512, "tokens of the prompts that nothing follows"),
        tokens=(32, "decoded after each prompt"),
        sequences=(2, "that are measured, after one that warms up"),
        limit=(450.0, "seconds after which no row is begun"),
        threads=(4, "of torch on the CPU"),
        scratch=(Path, "folder for the models, 14 GB each; a temporary one by default"),
        only=("", "rows of moectl whose name contains this"),
        lines=(False, "print each row as a line of JSON"),
        tiny=(False, "very small models, to try the road itself"),
        device=(str, "cuda:1, or cpu with --tiny"),
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=ON_DISK)
    return parser.parse_args()


if __name__ == "__main__":
    main()
