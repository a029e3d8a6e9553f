"""Each way to decode a token of a model that lies in memory: a row as in tools.gpu.bench, and with
`--profile` the kernels of a token by the device's time, the driver's calls by the host's, and the
Python functions that take longest. `--peer` adds llama.cpp's rows of a file that `llama-bench -o
json` wrote.

python -m tools.gpu.probes.tokens --models olmoe-1b-7b --profile near
"""

import cProfile
import io
import json
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from moectl.shared.preset_choice import AUTO, with_choice
from runtime.model.open import MoeModel, open_model
from runtime.policies.presets import preset
from runtime.session import settings as ways
from runtime.session.session import Session, Settings
from runtime.session.settings import DEVICE, HOST
from runtime.tiers.ram import RamStore
from tools.arguments import parser_of
from tools.gpu import models, sparse
from tools.gpu import rows as gpu_rows
from tools.gpu.check import forget
from tools.gpu.groups import tell
from tools.gpu.packages import experts_by
from tools.gpu.rows import Rates, Text

EMULATED_GBPS = 0.05  # of the emulated link without a GPU
PROFILED = 4  # tokens
LIKELY = "next_gate:least=0.05"
_LEAST_US = 5.0  # of a token, below which a kernel or a call is left out
_FUNCTIONS = 40
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Way:
    """Settings of one row: a preset at a budget, with policies of its own, and the side that
    decides."""

    preset: str
    budget: str
    decide: str = HOST
    policies: dict[str, str] = field(default_factory=dict)
    settles: str = ""  # a paper's statement, by what this row is beside the rows above

    @property
    def name(self) -> str:
        told = [self.preset, *self.policies.values(), *([DEVICE] if self.decide == DEVICE else [])]
        return " ".join(told)


WAYS = (
    Way("full", "100%"),
    Way(AUTO.name, "25%", ways.AUTO),
    Way("on-demand", "25%", DEVICE),
    Way("on-demand", "25%", DEVICE, {"eviction": "late_horizon"}),
    Way("on-demand", "25%", DEVICE, {"eviction": "late_horizon", "prefetch": LIKELY}),
    Way("behind", "25%"),
    Way("on-demand", "25%"),
    Way("mixtral-offloading", "25%"),
    Way("horizon", "25%"),
    Way("near", "25%"),
    Way("on-demand", "50%", DEVICE),
    Way("on-demand", "12.5%", DEVICE),
)
"""The rows, the most telling first: a later one may find no time."""
STATEMENTS = (
    Way("on-demand", "25%", settles="what the others are beside; MoEpic 2.2: ms a load, 1.72"),
    Way("mixtral-offloading", "25%", settles="all five: prefetching hides loads behind compute"),
    Way(
        "on-demand",
        "25%",
        policies={"miss": "random_resident"},
        settles="BuddyMoE's Tables 2 and 3, random: stand-ins for all misses, at every share alike",
    ),
    Way("on-demand", "50%", policies={"miss": "random_resident"}, settles="the same at 50 %"),
    Way(
        "on-demand",
        "25%",
        policies={"prefetch": "next_gate", "residency": "split:theta=0.5"},
        settles="MoEpic 4(b), 7(d): experts cut in two take less than whole ones",
    ),
    Way(
        "on-demand",
        "25%",
        policies={"prefetch": "next_gate", "residency": "split:theta=1.0"},
        settles="MoEpic 4(b), 7(d): whole ones",
    ),
    Way(
        "on-demand",
        "25%",
        policies={"prefetch": "score", "eviction": "least_stale"},
        settles="SpecMD Table 2: Least-Stale brings the first token sooner",
    ),
    Way(
        "on-demand",
        "25%",
        policies={"prefetch": "score", "eviction": "lru"},
        settles="SpecMD Table 2: than LRU",
    ),
)
"""Statements of docs/lab/reproduction.md that minutes of a GPU settle."""


def main() -> None:
    options = parser_of(
        __doc__,
        models=(["olmoe-1b-7b"], "by their shapes in tools.gpu.models"),
        layers=(int, "of every model, instead of its own number"),
        statements=(False, "the rows that settle statements of docs/lab/reproduction.md"),
        only=("", "rows whose name contains this"),
        budget=("", "rows at this budget"),
        profile=("", "rows that are profiled as well: those whose name contains this, or `all`"),
        prompt=(128, "tokens of a prompt"),
        tokens=(32, "decoded after each prompt"),
        sequences=(2, "that are measured, after one that warms up"),
        limit=(240.0, "seconds after which no row is begun"),
        peer=("", "file that `llama-bench -o json` wrote on this machine"),
        threads=(len(os.sched_getaffinity(0)), "of the CPU"),
        device="cuda",
        tiny=(False, "very small models, to try the probe itself"),
    ).parse_args()
    end_s = time.monotonic() + options.limit
    torch.set_num_threads(options.threads)
    for row in _of_peer(options.peer):
        tell(**row)
    for model in options.models:
        with _in_memory(model, options) as (opened, text, rates):
            for way in STATEMENTS if options.statements else WAYS:
                is_asked = options.only in way.name and way.budget.startswith(options.budget)
                if is_asked and time.monotonic() < end_s:
                    _measure(model, opened, text, rates, way, options)
                    forget()


@contextmanager
def _in_memory(model: str, options: object) -> Iterator[tuple[MoeModel, Text, Rates]]:
    """Make a model, open it from memory, and bring its experts to RAM once for all rows."""
    shape = models.SHAPES[model]
    is_gpu = options.device != "cpu"
    folder = _IN_MEMORY if _IN_MEMORY.is_dir() and not options.tiny else None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        layers = options.layers or shape.layers
        sizes = {"layers": layers, "device": options.device, "tiny": options.tiny}
        models.save(shape, Path(scratch), **sizes)
        forget()
        begin_s = time.perf_counter()
        opened = open_model(scratch, device=torch.device(options.device))
        if shape.is_sparse:
            held = sparse.with_experts(opened, pin=is_gpu)
        else:
            held = replace(opened, store=RamStore(opened.store, pin=is_gpu))
        seconds = time.perf_counter() - begin_s
        rates = Rates(
            gpu_rows.link_rate(options.device) if is_gpu else EMULATED_GBPS * 1e9,
            gpu_rows.memory_rate(options.device),
        )
        tell(name=f"{model} opened", seconds=seconds, link=rates.link, memory=rates.memory)
        length = options.prompt + options.tokens
        vocabulary = opened.config.vocab_size
        sequences = models.texts(vocabulary, count=options.sequences + 1, length=length)
        yield held, Text(sequences, options.prompt), rates
        opened.store.close()


def _of_peer(file: str) -> Iterator[dict[str, object]]:
    """Yield llama.cpp's rows: milliseconds of a prompt, or of a decoded token."""
    for test in json.loads(Path(file).read_text(encoding="utf-8")) if file else ():
        is_prompt = test["n_gen"] == 0
        count = test["n_prompt"] if is_prompt else 1
        yield {
            "name": f"llama.cpp, experts of {test['n_cpu_moe']} layers on the CPU",
            "model": test["model_type"],
            "threads": test["n_threads"],
            "ttft_ms" if is_prompt else "tpot_ms": count / test["avg_ts"] * 1e3,
            "prompt" if is_prompt else "decoded": test["n_prompt"] or test["n_gen"],
        }


def _measure(
    model: str, opened: MoeModel, text: Text, rates: Rates, way: Way, options: object
) -> None:
    """Print the row of a way; a row that fails says why."""
    settings = _settings(opened, way, options.device)
    begin_s = time.perf_counter()
    row = gpu_rows.attempt(
        way.name, way.budget, lambda: gpu_rows.session_row(opened, settings, text, rates)
    )
    told = asdict(replace(row, name=way.name)) | {"floor_share": row.floor_share}
    took_s = time.perf_counter() - begin_s
    tell(
        model=model,
        **told,
        preset=preset(settings.preset).name,
        took_s=took_s,
        **({"settles": way.settles} if way.settles else {}),
    )
    if not row.why_not and options.profile and options.profile in ("all", *way.name.split()):
        _profile(opened, settings, text, name=way.name)


def _settings(opened: MoeModel, way: Way, device: str) -> Settings:
    """Return the settings of a way, with what `auto` chooses for this model on this machine."""
    link = "auto" if device != "cpu" else f"{EMULATED_GBPS}GB/s"
    if way.preset != AUTO.name:
        own = {"link": link, "policies": way.policies, "decide": way.decide}
        return gpu_rows.settings_of(opened, way.preset, way.budget, **own)
    asked = Settings(
        AUTO, budget=way.budget, link=link, experts=experts_by(device), decide=way.decide
    )
    return with_choice(opened, asked, None)[0]


def _profile(opened: MoeModel, settings: Settings, text: Text, *, name: str) -> None:
    """Print the kernels of a token, the driver's calls, and the Python functions that take
    longest."""
    ids = torch.from_numpy(text.sequences[0])[None]
    with Session(opened, settings) as session:
        past = session.forward(ids[:, : text.prompt]).past_key_values
        position = text.prompt

        def decode(count: int) -> None:
            nonlocal past, position
            for _ in range(count):
                token = ids[:, position : position + 1]
                past = session.forward(token, past=past).past_key_values
                position += 1

        decode(PROFILED)  # compiles and captures
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if opened.model.device.type == "cuda" else []
        with profile(activities=kinds) as profiled:
            decode(PROFILED)
        events = profiled.key_averages()
        tell(kernels=name, rows=_costs(events, lambda one: one.self_device_time_total))
        tell(host=name, rows=_costs(events, lambda one: one.self_cpu_time_total))
        functions = cProfile.Profile()
        functions.runcall(decode, PROFILED)
    told = io.StringIO()
    pstats.Stats(functions, stream=told).sort_stats("tottime").print_stats(_FUNCTIONS)
    tell(functions=name, tokens=PROFILED, text=told.getvalue())


def _costs(events: object, cost: Callable[[object], float]) -> list[tuple[str, float, float]]:
    """Return name, number of calls and microseconds of a token, the largest first."""
    found = [(one.key[:70], one.count / PROFILED, round(cost(one) / PROFILED, 1)) for one in events]
    return sorted([one for one in found if one[2] >= _LEAST_US], key=lambda one: -one[2])


if __name__ == "__main__":
    main()
