"""`moectl demo`: the whole road on the bundled model, without a network: profile, buddies, four presets, one table."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from artifacts.hardware.machines import machine
from artifacts.store.store import Store
from moectl.bundled import demo_model
from moectl.commands.build_buddies import build_buddies
from moectl.commands.profile import Request, profile_opened
from moectl.shared.opening import check_store, model_info, open_quietly
from moectl.shared.progress import progress_bar
from moectl.show.pictures import Demonstration, DemoRow
from moectl.show.render import Sheet, human_bytes, show_json, show_sheet
from profilers.compare.quality import Reading, compare, read
from profilers.text.batches import Batching
from profilers.text.corpus import documents, token_sequences
from runtime.control.counters import hit_rate
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.session.artefacts import load_artefacts
from runtime.session.probe import Rates, scaled_rates, scaled_window
from runtime.session.session import Session, Settings

PRESETS = ("full", "on-demand", "near", "buddymoe")
_NUM_SEQUENCES, _PREFILL, _DECODE = 6, 64, 64


@dataclass(frozen=True, slots=True)
class _Measured:
    reading: Reading
    totals: dict[str, int]
    receipt: dict[str, object]


def demo(*, budget: str, scaled_to: str, tokens: int, store: Path | None, threads: int) -> Demonstration:
    """Profile the bundled model on `tokens` tokens of docstrings, then measure it on held-out ones.

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
        for turn, preset in enumerate(PRESETS):
            before = turn * total // len(PRESETS)
            settings = _settings(preset, budget, rates, window)
            measured[preset] = _measure(
                opened, settings, artefacts, sequences, lambda done, before=before: advance(before + done, total)
            )
    full = measured["full"].reading
    rows = [_row(preset, each, full) for preset, each in measured.items()]
    conditions = (
        f"{_NUM_SEQUENCES} held-out texts, {_PREFILL} tokens of prompt and {_DECODE} decoded each; budget {budget}; "
        f"link {rates.link / 1e9:.4f} GB/s, near {rates.near / 1e9:.4f} GB/s: {scaled_to} in proportion"
    )
    return Demonstration(rows, budget, conditions, {preset: each.receipt for preset, each in measured.items()})


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
    request = Request("builtin", tokens, Batching())
    with Session(opened, Settings(budget="25%")) as session:
        profile_opened("the bundled model", session, request, store=store)
    build_buddies(store, run=None, alpha="0.95", k_max=16, metric="coactivation")
    with Store.open(store, read_only=True) as held:
        return load_artefacts(held, model_info("", opened).model_id, opened.shape)


def _held_out(opened: MoeModel) -> list[np.ndarray]:
    """The beginnings of the first held-out docstrings that are long enough."""
    length = _PREFILL + _DECODE
    found: list[np.ndarray] = []
    for document in documents("builtin:held-out"):
        sequence = next(iter(token_sequences([document], opened.tokenizer, length=length, num_tokens=length)))
        if len(sequence) == length:
            found.append(sequence)
        if len(found) == _NUM_SEQUENCES:
            break
    return found


def _settings(preset: str, budget: str, rates: Rates, window: int) -> Settings:
    """What `scaled_to` would set, measured once, so that every preset has the same link and near tier."""
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
    """Read the held-out text once, after the first of it has warmed the cache."""
    with Session(opened, settings, artefacts=artefacts) as session:
        read(session, sequences[:1], prefill=_PREFILL)
        first_pass = len(session.controller.counters.passes)
        reading = read(session, sequences, prefill=_PREFILL, progress=progress)
        totals = session.controller.counters.totals(first_pass=first_pass)
        return _Measured(reading, totals, session.receipt())


def _row(preset: str, measured: _Measured, full: Reading) -> DemoRow:
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
