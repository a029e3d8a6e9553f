"""A prompt over an emulated link at a quarter of the experts, against a lower bound of its time.

A section of tools.bench.decode. The floor is the longer of two: the same prompt with every expert
resident, and all bytes of all experts once over the link; the last column counts only the bytes
that were loaded. Links have the rate at which both are equal, half of it and twice as much.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from runtime.tiers.ram import RamStore
from tools.bench.performance import Ratio, Section, Table

PRESET = "on-demand"
BUDGET = "25%"
SPEEDS = (0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt at the budget: its seconds, the stall in them, seconds with full residency, and
    loaded bytes."""

    seconds: float
    stall_s: float
    resident_s: float
    moved: int


def measure(models: dict[str, Path], *, rounds: int, length: int) -> Section:
    """A table for each model, on random prompts of `length` tokens."""
    return Section(
        "prefill",
        [table(name, folder, rounds=rounds, length=length) for name, folder in models.items()],
    )


def table(name: str, folder: Path, *, rounds: int, length: int) -> Table:
    """One model. Each round is another prompt, first at the budget, then with every expert
    resident."""
    opened, full = (open_model(str(folder)) for _ in range(2))
    opened = replace(opened, store=RamStore(opened.store))
    random = np.random.default_rng(0)
    prompts = [
        torch.from_numpy(random.integers(3, opened.config.vocab_size, (1, length)))
        for _ in range(rounds + 1)
    ]
    with Session(full, Settings("full")) as resident:
        alike_s = median([_seconds(resident, prompt) for prompt in prompts][1:])
        found = {
            speed: _prompts(
                opened, resident, f"{speed * opened.shape.nbytes / alike_s:.0f}B/s", prompts
            )
            for speed in SPEEDS
        }
    return _table(name, opened.shape.nbytes, alike_s, found, f"{rounds} prompts of {length} tokens")


def _prompts(
    opened: MoeModel, resident: Session, link: str, prompts: list[torch.Tensor]
) -> list[Prompt]:
    found = []
    with Session(opened, Settings(PRESET, budget=BUDGET, link=link)) as session:
        for prompt in prompts:
            seconds = _seconds(session, prompt)
            [counters] = [session.controller.counters.by_layer(first_pass=-1)]
            moved = sum(layer["demand_bytes"] + layer["prefetch_bytes"] for layer in counters)
            found.append(
                Prompt(seconds, session.engine.stall_s[-1], _seconds(resident, prompt), moved)
            )
    return found[1:]  # without the warm-up


def _seconds(session: Session, prompt: torch.Tensor) -> float:
    session.new_requests(1)
    begin_s = time.perf_counter()
    session.forward(prompt)
    return time.perf_counter() - begin_s


def _table(
    name: str, nbytes: int, alike_s: float, found: dict[float, list[Prompt]], told: str
) -> Table:
    rows = []
    ratios = {}
    for speed, prompts in found.items():
        rate = speed * nbytes / alike_s
        seconds = [one.seconds for one in prompts]
        ratio = Ratio.of(seconds, [max(one.resident_s, nbytes / rate) for one in prompts])
        strict = Ratio.of(seconds, [max(one.resident_s, one.moved / rate) for one in prompts])
        middle = [
            median(getattr(one, part) for one in prompts)
            for part in ("seconds", "stall_s", "resident_s")
        ]
        moved = median(one.moved for one in prompts) / nbytes
        cells = [f"{seconds * 1e3:.0f}" for seconds in (*middle, nbytes / rate)]
        rows.append(
            (
                f"{rate / 1e9:.3g} GB/s",
                *cells,
                f"{moved:.0%}",
                *ratio.cells(),
                f"{strict.median:.3f}",
            )
        )
        ratios[f"{name}, {speed:g} of the rate"] = ratio
    columns = (
        "link",
        "prompt, ms",
        "of it waiting",
        "all resident",
        "all bytes over the link",
        "bytes that came",
    )
    note = f"medians over {told}, {PRESET} at {BUDGET} after another prompt"
    return Table(
        name, (*columns, "to the longer", "quartiles", "by bytes that came"), rows, note, ratios
    )
