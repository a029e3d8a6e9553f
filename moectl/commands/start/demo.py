"""`moectl demo`: the bundled model, offline: profile, buddies, replicas, presets beside each other,
one table."""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.hardware.machines import machine
from moectl.bundled import demo_model
from moectl.cli import completion
from moectl.cli.options import DEFAULT_THREADS, Budget, Json, Threads
from moectl.commands.build.build_buddies import make_buddies
from moectl.commands.build.profile import ProfileOptions, profile_opened
from moectl.commands.build.quantize import QuantizeOptions, make_replicas
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from moectl.shared.terminal.progress import Phases
    from moectl.show.demonstration import Demonstration, DemoRow
    from profilers.compare.bench import BenchText
    from profilers.compare.quality import TextReading
    from runtime.links.clock import Clock
    from runtime.model.open import MoeModel
    from runtime.policies.base import Artefacts
    from runtime.session.probe import Rates
    from runtime.session.session import Session

PRESETS = ("full", "on-demand", "near", "horizon", "shadow", "buddymoe")
PUBLISHED = "50%"  # the middle one of the budgets that BuddyMoE's paper reports
AT_PUBLISHED = ("on-demand", "buddymoe")
_NUM_SEQUENCES = 6
_PREFILL = 32
_DECODE = 32
# times that the machine's speed is measured; the link is scaled to the fastest, the least disturbed
# one: processor time too was seen to vary 2.6 times where all cores were taken
_PROBES = 20
_CALIBRATION = {
    "samples": 16,
    "length": 256,
}  # of replicas by the quick recipe: enough for these experts, in seconds

_NEXT = """
Your own model, a folder, a GGUF file or a hub id:
  moectl plan MODEL          will it fit, and how fast (calculated)
  moectl run MODEL -p "..."  its experts where they fit best
  moectl advise MODEL        the flags for llama.cpp or another engine"""


@dataclass(slots=True)
class _Entry:
    """A preset at a budget, its session, and what it read in each round."""

    preset: str
    budget: str
    session: "Session"
    first_pass: int = 0
    readings: list["TextReading"] = field(default_factory=list)

    def reading(self) -> "TextReading":
        """All rounds as one reading."""
        import torch

        from profilers.compare.quality import TextReading

        return TextReading(
            torch.cat([one.logits for one in self.readings]),
            torch.cat([one.targets for one in self.readings]),
            *(
                sum((getattr(one, name) for one in self.readings), ())
                for name in ("prefill_s", "decode_s", "stall_s")
            ),
        )

    def token_s(self) -> list[float]:
        """The median time of a decoded token in each round."""
        return [statistics.median(one.decode_s) for one in self.readings]


def demo(
    *,
    budget: Budget = "25%",
    scaled_to: Annotated[
        str,
        typer.Option(
            help="The machine whose proportions are emulated.", autocompletion=completion.machines
        ),
    ] = "rtx3090-pcie4",
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens to profile.")] = 16_384,
    threads: Threads = DEFAULT_THREADS,
    store: Annotated[Path | None, typer.Option(help="Keep the artefacts in this store.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw time against quality to this SVG file.")
    ] = None,
    json: Json = False,
) -> None:
    """Try presets on the bundled model, offline, in a minute."""
    with importing():
        from moectl.charts.pictures import check_picture, write_picture
        from moectl.show.demonstration import drawing, sentence, sheet
        from moectl.show.render import console, show_json, show_sheet

    if picture:
        check_picture(picture)
    demonstration = _demonstrated(
        budget=budget, scaled_to=scaled_to, tokens=tokens, store=store, threads=threads
    )
    if json:
        show_json(demonstration.records())
    else:
        show_sheet(sheet(demonstration))
        console().print(sentence(demonstration), markup=False)
        console().print(_NEXT, markup=False)
    if picture:
        write_picture(drawing(demonstration), picture)


@resumable()
def _demonstrated(
    *, budget: str, scaled_to: str, tokens: int, store: Path | None, threads: int
) -> "Demonstration":
    """Profile the bundled model on `tokens` tokens of docstrings, then measure every preset on
    held-out ones.

    A round is one text, which every preset reads over the same emulated link, in an order drawn
    anew; `full` is the reference of speed in each round, and of quality.
    """
    with importing():
        import torch

        from moectl.shared.opening import open_quietly
        from moectl.shared.stores import check_store
        from moectl.shared.terminal.progress import Phases
        from moectl.show.flow import show_aside
        from runtime.links.clock import ThreadClock
        from runtime.session.probe import scaled_rates, scaled_window

    torch.set_num_threads(threads)
    target = machine(scaled_to)
    if store:
        check_store(store)
    opened = open_quietly(str(demo_model()))
    show_aside(_loaded(opened, scaled_to))
    window = scaled_window(opened.shape, target)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ExitStack() as sessions,
        Phases(3, 4, 10) as phases,
    ):
        artefacts = _artefacts(opened, store or Path(scratch) / "demo.duckdb", tokens, phases)
        torch.set_num_threads(1)  # the clock is that of one thread
        clock = ThreadClock()
        probes = [scaled_rates(opened, target, clock=clock.now_s) for _ in range(_PROBES)]
        rates = max(probes, key=lambda rates: rates.link)
        phases.begin("measuring presets on held-out text")
        entries = []
        for preset, held in _places(budget):
            session = sessions.enter_context(_session(preset, held, artefacts, rates, window))
            session.parts.tiers.emulate_by(clock)
            entries.append(_Entry(preset, held, session))
        _measure(entries, _held_out(opened), clock)
        return _demonstration(entries, budget, scaled_to)


def _loaded(opened: "MoeModel", scaled_to: str) -> str:
    """Return what is loaded, where it runs, and how busy that machine is."""
    import torch

    from moectl.show.render import human_bytes
    from profilers.hardware.this_machine import LocalMachine

    shape = opened.shape
    here = LocalMachine.look(torch.device("cpu"))
    load = "" if here.load is None else f", load {here.load:.1f}"
    return (
        f"the bundled model: {shape.num_layers} layers of {shape.num_experts} experts, "
        f"{human_bytes(shape.num_keys * shape.expert_nbytes)} of {opened.expert_format}; "
        f"{here.cores} cores of {here.processor}{load}, in the proportions of {scaled_to}"
    )


def _places(budget: str) -> list[tuple[str, str]]:
    """Presets with their budgets."""
    published = [(preset, PUBLISHED) for preset in AT_PUBLISHED if budget != PUBLISHED]
    return [(preset, "100%" if preset == PRESETS[0] else budget) for preset in PRESETS] + published


def _artefacts(opened: "MoeModel", store: Path, tokens: int, phases: "Phases") -> "Artefacts":
    from moectl.shared.stores import stored_artefacts
    from profilers.quantise.method import Method
    from profilers.text.batches import Batching
    from runtime.session.session import Session, Settings

    phases.begin("profiling the routers")
    options = ProfileOptions(tokens=tokens, similarity=False)
    with Session(opened, Settings(budget="25%")) as session:
        profile_opened(str(demo_model()), session, options, Batching(), seed=0, store=store)
    make_buddies(store, run=None, alpha="0.95", k_max=16, metric="coactivation")
    phases.begin("making replicas of few bits")
    make_replicas(None, Method(), QuantizeOptions(**_CALIBRATION, jobs=1), store=store)
    return stored_artefacts(store, opened)


def _session(
    preset: str, budget: str, artefacts: "Artefacts", rates: "Rates", window: int
) -> "Session":
    """A session over a model of its own, so that all can be open at once. The rates are measured
    once for all."""
    from moectl.shared.opening import open_quietly
    from runtime.session.session import Session, Settings

    settings = Settings(
        preset=preset,
        budget=budget,
        link=f"{rates.link:.0f}B/s",
        near=f"{rates.near:.0f}B/s",
        window=f"{window}B",
    )
    return Session(open_quietly(str(demo_model())), settings, artefacts=artefacts)


def _held_out(opened: "MoeModel") -> "BenchText":
    """Return the beginnings of the first held-out docstrings that are long enough: one to warm up,
    one a round."""
    from moectl.shared.text import read_text

    length = _PREFILL + _DECODE
    num_tokens = (_NUM_SEQUENCES + 1) * length
    return read_text(opened, "builtin:held-out", length=length, num_tokens=num_tokens, seed=0)


def _measure(entries: Sequence[_Entry], text: "BenchText", clock: "Clock") -> None:
    """Warm every cache with a prompt, then read a sequence a round with all presets, timed by this
    clock."""
    import torch

    from moectl.shared.terminal.progress import progress_bar
    from profilers.compare.bench import schedule
    from profilers.compare.quality import read

    warm_up, *sequences = text.sequences
    for entry in entries:
        entry.session.new_requests(1)
        entry.session.forward(torch.from_numpy(warm_up)[None])
        entry.first_pass = entry.session.num_passes
    order = schedule(entries, rounds=len(sequences), seed=0)
    with progress_bar("measuring", unit="texts") as advance:
        for number, (turn, entry) in enumerate(order):
            advance(number, len(order))
            sequence = [sequences[turn]]
            entry.readings.append(
                read(entry.session, sequence, prefill=text.prefill, clock=clock.now_s)
            )


def _demonstration(entries: Sequence[_Entry], budget: str, scaled_to: str) -> "Demonstration":
    from moectl.show.demonstration import Demonstration
    from moectl.show.grounds import measured

    full = entries[0]
    rows = [_row(entry, full) for entry in entries]
    rounds = len(full.readings)
    conditions = (
        "Time: a decoded token's processor time and waits for the emulated link, over those of "
        f"full in the same round, median of {rounds} rounds (quartiles); "
        "held: experts in fast memory; "
        f"loss: of perplexity on {rounds * _DECODE} tokens (+- standard error); top-1: tokens with "
        "the same first choice. A round is a "
        f"held-out text, {_PREFILL} tokens of prompt and {_DECODE} decoded. shadow holds every "
        "expert in few bits, so that nothing is moved. buddymoe replaces the weaker half of a "
        "token's experts only; its paper holds 37.5% to 75%."
    )
    receipts = {_name(entry, budget): entry.session.receipt() for entry in entries}
    return Demonstration(
        rows, budget, rounds * _DECODE, measured(scaled_to).says, conditions, receipts
    )


def _name(entry: _Entry, budget: str) -> str:
    return entry.preset if entry.budget in (budget, "100%") else f"{entry.preset} {entry.budget}"


def _row(entry: _Entry, full: _Entry) -> "DemoRow":
    from moectl.show.demonstration import DemoRow
    from profilers.compare.bench import Quartiles
    from profilers.compare.quality import compare
    from runtime.control.counters import altered, hit_rate

    reading = entry.reading()
    quality = compare(reading, full.reading())
    totals = entry.session.controller.counters.totals(first_pass=entry.first_pass)
    ratios = [mine / theirs for mine, theirs in zip(entry.token_s(), full.token_s(), strict=True)]
    spread = Quartiles.of(ratios)
    return DemoRow(
        preset=entry.preset,
        budget=entry.budget,
        hit_rate=hit_rate(totals),
        moved_bytes=totals["demand_bytes"] + totals["prefetch_bytes"],
        exposed_ms=statistics.median(reading.stall_s) * 1e3,
        ms_per_token=statistics.median(reading.decode_s) * 1e3,
        times_full=spread.median,
        lower=spread.lower,
        upper=spread.upper,
        perplexity_ratio=quality.perplexity_ratio,
        kl=quality.kl,
        top1_agreement=quality.top1_agreement,
        altered=altered(totals),
        loss_error=quality.loss_error,
    )
