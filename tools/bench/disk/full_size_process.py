"""Opens one checkpoint and decodes from disk at several budgets, in a process of its own.

    python -m tools.bench.disk.full_size_process FOLDER REQUEST     REQUEST as JSON, by full_size

Cold: the page cache of the files is dropped before every token. Warm: what the token loads is read
into the page cache before. Both decode the same tokens after the same prompt, in sessions of their
own, and so load the same experts.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, log
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.expert_store import DiskStore
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tools.bench.disk.device_reads import Place, cached_rate, copy_rate, direct_rate, keep
from tools.bench.measuring import drop, forget_peak, peak_nbytes, read_nbytes

_FULLER = 1.2  # experts that the prompt before the first token selects, over those that fit


@dataclass(frozen=True, slots=True)
class FullSizeRequest:
    """Measurements to make: `tokens` decoded cold and warm at each budget, and a prompt of `prompt`
    tokens at budget `of_prompt`."""

    budgets: tuple[str, ...]
    tokens: int
    prompt: int
    of_prompt: str


@dataclass(frozen=True, slots=True)
class Opening:
    """Opening of a checkpoint: `seconds` with the page cache dropped before, and `dense_nbytes` of
    all weights but experts."""

    seconds: float
    peak_nbytes: int
    dense_nbytes: int
    expert_nbytes: int  # of all experts
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """Medians over tokens.

    Compute waited `waited_s` in a token for loads, which came at `rate` bytes per second while at
    least one was under way. `beside` is the rate that they are compared with.
    """

    seconds: float
    waited_s: float
    loaded_nbytes: float
    read_nbytes: float  # by the device
    rate: float
    beside: float


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one budget.

    `peak_nbytes` is the peak resident memory of decoding cold. `direct_rate` is the rate of the
    same reads by themselves past the page cache, 0 where there are none.
    """

    budget: str
    slots_nbytes: int
    hit_rate: float
    peak_nbytes: int
    cold: Decoded
    warm: Decoded
    direct_rate: float


@dataclass(frozen=True, slots=True)
class Prompted:
    """One prompt, the page cache dropped before."""

    tokens: int
    budget: str
    seconds: float
    waited_s: float
    loaded_nbytes: int
    is_finite: bool


@dataclass(frozen=True, slots=True)
class FullSizeMeasurement:
    opening: Opening
    cells: tuple[Cell, ...]
    prompt: Prompted


class _Token(NamedTuple):
    """One decoded token: its place by position, what it took and which reads it caused."""

    seconds: float
    waited_s: float
    loaded_nbytes: int
    read_nbytes: int
    rate: float
    places: list[Place]


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads(sys.argv[2])
    request = FullSizeRequest(**request | {"budgets": tuple(request["budgets"])})
    print(json.dumps(asdict(measure(folder, request))))


def measure(folder: Path, request: FullSizeRequest) -> FullSizeMeasurement:
    torch.set_num_threads(1)
    opened, opening = _opening(folder)
    cells = tuple(
        _cell(opened, folder, budget, tokens=request.tokens) for budget in request.budgets
    )
    return FullSizeMeasurement(opening, cells, _prompted(opened, folder, request))


def _opening(folder: Path) -> tuple[MoeModel, Opening]:
    checkpoint = open_checkpoint(folder)
    num_tensors = len(checkpoint.tensors)
    checkpoint.close()
    drop(folder)
    begin_s = time.perf_counter()
    opened = open_model(str(folder))
    seconds = time.perf_counter() - begin_s
    resident = [
        tensor
        for tensor in (*opened.model.parameters(), *opened.model.buffers())
        if not tensor.is_meta
    ]
    dense_nbytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in resident}.values())
    return opened, Opening(seconds, peak_nbytes(), dense_nbytes, opened.shape.nbytes, num_tensors)


def _cell(opened: MoeModel, folder: Path, budget: str, *, tokens: int) -> Cell:
    forget = partial(drop, folder)
    forget_peak()
    with _session(opened, budget) as session:
        first_pass = session.num_passes + 1
        cold = []
        alone = []
        past = []
        for token in _decoded(session, budget, tokens, before=lambda _: forget()):
            cold.append(token)
            forget()
            alone.append(cached_rate(token.places))
            forget()
            past.append(direct_rate(token.places))
        peak = peak_nbytes()
        slots_nbytes = session.parts.slots.nbytes
        hit_rate = session.effort(first_pass=first_pass).hit_rate
    with _session(opened, budget) as session:
        warm = list(
            _decoded(session, budget, tokens, before=lambda number: keep(cold[number].places))
        )
    copied = [copy_rate(opened.shape.expert_nbytes, 64) for _ in range(3)]
    decoded = _medians(cold, alone), _medians(warm, copied)
    return Cell(budget, slots_nbytes, hit_rate, peak, *decoded, median(past))


def _prompted(opened: MoeModel, folder: Path, request: FullSizeRequest) -> Prompted:
    ids = _ids(opened, request.prompt)
    with _session(opened, request.of_prompt) as session:
        drop(folder)
        begin_s = time.perf_counter()
        logits = session.forward(ids).logits
        seconds = time.perf_counter() - begin_s
        effort = session.effort()
        is_finite = bool(logits[0, -1].isfinite().all())
    loaded = effort.counters["demand_bytes"]
    waited_s = effort.exposed_ms / 1e3
    return Prompted(request.prompt, request.of_prompt, seconds, waited_s, loaded, is_finite)


def _session(opened: MoeModel, budget: str) -> Session:
    return Session(opened, Settings(budget=budget, link="disk", device="cpu", experts="fused"))


def _decoded(
    session: Session, budget: str, tokens: int, *, before: Callable[[int], None]
) -> Iterator[_Token]:
    """Decode after a prompt that fills the fast tier; `before` is called with each token's number
    and not measured."""
    opened = session.opened
    link = session.parts.tiers.link
    length = _filling(opened, float(budget.removesuffix("%")) / 100)
    ids = _ids(opened, length + tokens)
    past = session.forward(ids[:, :length]).past_key_values
    for number in range(tokens):
        before(number)
        first_pass = session.num_passes
        copy_s = link.copy_s
        read = read_nbytes()
        with _recorded(opened.store) as keys:
            begin_s = time.perf_counter()
            past = session.forward(ids[:, [length + number]], past=past).past_key_values
            seconds = time.perf_counter() - begin_s
        effort = session.effort(first_pass=first_pass)
        loaded = effort.counters["demand_bytes"]
        places = [Place(*place) for key in keys for place in opened.store.places(*key)]
        rate = loaded / max(link.copy_s - copy_s, 1e-9)
        yield _Token(seconds, effort.exposed_ms / 1e3, loaded, read_nbytes() - read, rate, places)


def _filling(opened: MoeModel, share: float) -> int:
    """Tokens that select a little more than this share of all experts, if they select at random."""
    shape = opened.shape
    return ceil(log(1 - min(0.9, _FULLER * share)) / log(1 - shape.top_k / shape.num_experts))


def _ids(opened: MoeModel, count: int) -> torch.Tensor:
    return torch.randint(
        3, opened.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0)
    )


@contextmanager
def _recorded(store: DiskStore) -> Iterator[list[tuple[int, int]]]:
    """The layers and experts that are read meanwhile."""
    keys = []
    read = store.read

    def recording(layer: int, expert: int, out: torch.Tensor, **options: object) -> None:
        keys.append((layer, expert))
        read(layer, expert, out, **options)

    store.read = recording
    try:
        yield keys
    finally:
        del store.read


def _medians(tokens: Sequence[_Token], beside: Sequence[float]) -> Decoded:
    columns = (median(getattr(token, name) for token in tokens) for name in _Token._fields[:-1])
    return Decoded(*columns, median(beside))


if __name__ == "__main__":
    main()
