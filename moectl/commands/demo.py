"""`moectl demo`: the bundled model, offline: profile, buddies, four presets, one table."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from artifacts.hardware.machines import machine
from moectl.bundled import demo_model
from moectl.commands.build_buddies import build_buddies
from moectl.commands.profile import ProfileRequest, profile_opened
from moectl.shared.opening import open_quietly
from moectl.shared.progress import progress_bar
from moectl.shared.resuming import resumable
from moectl.shared.stores import check_store, stored_artefacts
from moectl.show.pictures import Demonstration, DemoRow
from moectl.show.render import Sheet, human_bytes, show_json, show_sheet
from profilers.compare.quality import TextReading, compare, read
from profilers.text.batches import Batching
from profilers.text.corpus import documents, token_sequences
from runtime.control.counters import hit_rate
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.session.probe import Rates, scaled_rates, scaled_window
from runtime.session.session import Session, Settings

PRESETS = ("full", "on-demand", "near", "buddymoe")
_NUM_SEQUENCES, _PREFILL, _DECODE = 6, 64, 64


@dataclass(frozen=True, slots=True)
class _Measured:
    reading: TextReading
    totals: dict[str, int]
    receipt: dict[str, object]


@resumable()
def demo(*, budget: str, scaled_to: str, tokens: int, store: Path | None, threads: int) -> Demonstration:
    """Profile the bundled model on `tokens` tokens of docstrings, then measure every preset on held-out ones.

    Every preset reads the same text over the same emulated link; `full` is the reference of speed and quality.
    """
    torch.set_num_threads(threads)
    target = machine(scaled_to)
    if store:
        check_store(store)
    opened = open_quietly(str(demo_model()))
    rates, window = scaled_rates(opened, target), scaled_window(opened.shape, target)
    with tempfile.TemporaryDirectory() as scratch:
        artefacts = _artefacts(opened, store or Path(scratch) / "demo.duckdb", tokens)
    sequences = _held_out(opened)
    measured = {}
    with progress_bar("running", unit="tokens") as advance:
        total = len(PRESETS) * _NUM_SEQUENCES * _DECODE
        for number, preset in enumerate(PRESETS):
            before = number * total // len(PRESETS)
            settings = _settings(preset, budget, rates, window)
            measured[preset] = _measure(
                opened, settings, artefacts, sequences, lambda done, before=before: advance(before + done, total)
            )
    full = measured["full"].reading
    rows = [_row(preset, result, full) for preset, result in measured.items()]
    conditions = (
        f"{_NUM_SEQUENCES} held-out texts, {_PREFILL} tokens of prompt and {_DECODE} decoded each; budget {budget}; "
        f"link {rates.link / 1e9:.4f} GB/s, near {rates.near / 1e9:.4f} GB/s: {scaled_to} in proportion"
    )
    return Demonstration(rows, budget, conditions, {preset: result.receipt for preset, result in measured.items()})


def show(demonstration: Demonstration, *, as_json: bool) -> None:
    if as_json:
        show_json(asdict(demonstration))
    else:
        show_sheet(sheet(demonstration))


def sheet(demonstration: Demonstration) -> Sheet:
    columns = (
        "preset",
        "hit rate",
        "moved",
        "stall, ms/token",
        "ms/token",
        "perplexity ratio",
        "top-1 agreement",
    )
    rows = [
        (
            row.preset,
            f"{row.hit_rate:.3f}",
            human_bytes(row.moved_bytes),
            f"{row.exposed_ms:.2f}",
            f"{row.ms_per_token:.2f}",
            f"{row.perplexity_ratio:.3f}",
            f"{row.top1_agreement:.3f}",
        )
        for row in demonstration.rows
    ]
    title = f"The bundled model with {demonstration.budget} of its experts in the fast tier"
    return Sheet(title, columns, rows, demonstration.conditions)


def _artefacts(opened: MoeModel, store: Path, tokens: int) -> Artefacts:
    request = ProfileRequest("builtin", tokens, Batching())
    with Session(opened, Settings(budget="25%")) as session:
        profile_opened("the bundled model", session, request, store=store)
    build_buddies(store, run=None, alpha="0.95", k_max=16, metric="coactivation")
    return stored_artefacts(store, opened)


def _held_out(opened: MoeModel) -> list[np.ndarray]:
    """Return the beginnings of the first held-out docstrings that are long enough."""
    length = _PREFILL + _DECODE
    sequences: list[np.ndarray] = []
    for document in documents("builtin:held-out"):
        sequence = next(iter(token_sequences([document], opened.tokenizer, length=length, num_tokens=length)))
        if len(sequence) == length:
            sequences.append(sequence)
        if len(sequences) == _NUM_SEQUENCES:
            break
    return sequences


def _settings(preset: str, budget: str, rates: Rates, window: int) -> Settings:
    """Return the settings that `scaled_to` stands for. The rates are measured once, so that all presets share them."""
    return Settings(
        preset=preset,
        budget=budget,
        link=f"{rates.link:.0f}B/s",
        near=f"{rates.near:.0f}B/s",
        window=f"{window}B",
    )


def _measure(
    opened: MoeModel,
    settings: Settings,
    artefacts: Artefacts,
    sequences: list[np.ndarray],
    progress: Callable[[int], None],
) -> _Measured:
    """Read the held-out text once, after its first sequence has warmed the cache."""
    with Session(opened, settings, artefacts=artefacts) as session:
        read(session, sequences[:1], prefill=_PREFILL)
        first_pass = len(session.controller.counters.passes)
        reading = read(session, sequences, prefill=_PREFILL, progress=progress)
        totals = session.controller.counters.totals(first_pass=first_pass)
        return _Measured(reading, totals, session.receipt())


def _row(preset: str, measured: _Measured, full: TextReading) -> DemoRow:
    quality = compare(measured.reading, full)
    return DemoRow(
        preset=preset,
        hit_rate=hit_rate(measured.totals),
        moved_bytes=measured.totals["demand_bytes"] + measured.totals["prefetch_bytes"],
        exposed_ms=statistics.median(measured.reading.stall_s) * 1e3,
        ms_per_token=statistics.median(measured.reading.decode_s) * 1e3,
        perplexity_ratio=quality.perplexity_ratio,
        top1_agreement=quality.top1_agreement,
    )
