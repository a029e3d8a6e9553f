"""The rows of tools.gpu.bench: one for each way to run a model, beside the lower bound by its
bytes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from runtime.control import sizes
from runtime.control.counters import Counter, hit_rate
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.presets import Preset, Scope
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT, HOST
from tools.gpu.packages import experts_by

_COPIED = 256 << 20  # bytes, more than a GPU's cache holds


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of the link, and of the fast tier's memory (reads and writes of a copy
    within it)."""

    link: float
    memory: float


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences of one length. The first `prompt` tokens of each are the prompt; the first sequence
    warms up."""

    sequences: list[np.ndarray]
    prompt: int

    @property
    def num_decoded(self) -> int:
        """Decoded tokens without the warm-up sequence."""
        return sum(len(ids) - self.prompt for ids in self.sequences[1:])


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run a model: milliseconds of a prompt and of a decoded token, bytes moved and
    stall of the latter, all of them means.

    `floor_ms`: the longer of bytes moved over the link's rate and bytes read over memory's.
    `predicted_ms`: the milliseconds of a decoded token by a replay with measured times. A row
    without decoding has bytes and floor of its prompts.
    """

    name: str
    budget: str
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    moved_nbytes: float = 0.0
    stall_ms: float | None = 0.0  # None where it is not measured
    link_utilisation: float = 0.0
    hit_rate: float | None = None
    floor_ms: float | None = None
    predicted_ms: float | None = None
    fast_nbytes: int | None = None
    experts: str = ""
    why_not: str = ""

    @property
    def floor_share(self) -> float | None:
        """The floor's share of the time taken: 1 is the best possible."""
        taken_ms = self.ttft_ms if self.tpot_ms is None else self.tpot_ms
        return None if not taken_ms or self.floor_ms is None else self.floor_ms / taken_ms


def attempt(name: str, budget: str, measure: Callable[[], Row]) -> Row:
    """The row, or a row with the reason of its failure, so that an error does not hide other
    rows."""
    try:
        return measure()
    except Exception as error:
        return failed(name, budget, error)


def failed(name: str, budget: str, error: Exception) -> Row:
    """A row with one line on the error."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return Row(name, budget, why_not=f"{type(error).__name__}: {first}"[:200])


def memory_rate(device: str) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    nbytes = _COPIED if device != "cpu" else _COPIED // 16
    one, other = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / _median_s(lambda: other.copy_(one), device)


def link_rate(device: str) -> float:
    """Bytes per second from page-locked memory to the GPU."""
    host = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    return _COPIED / _median_s(lambda: there.copy_(host, non_blocking=True), device)


def active_nbytes(opened: MoeModel) -> int:
    """Bytes that a decoded token reads: its experts and all other weights but the embedding
    table."""
    model = opened.model
    shape = opened.shape
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    others = sum(
        one.nbytes
        for one in model.parameters()
        if not one.is_meta and (one is not table or table is head)
    )
    return others + shape.num_layers * shape.top_k * shape.expert_nbytes


def plain_row(model: torch.nn.Module, experts: str, text: Text, active: int, rates: Rates) -> Row:
    """A row of transformers with everything resident, by one of its experts implementations."""
    from profilers.compare.quality import read_by

    model.set_experts_implementation(experts)

    def forward(ids: torch.Tensor, past: object) -> object:
        return model(ids, past_key_values=past, use_cache=True)

    with torch.inference_mode():
        read_by(forward, text.sequences[:1], prefill=text.prompt, device=model.device)
        reading = read_by(forward, text.sequences[1:], prefill=text.prompt, device=model.device)
    return Row(
        f"transformers, {experts}",
        "all resident",
        ttft_ms=_mean_ms(reading.prefill_s),
        tpot_ms=_mean_ms(reading.decode_s),
        floor_ms=active / rates.memory * 1e3,
        fast_nbytes=sum(one.nbytes for one in model.parameters()),
        experts=experts,
    )


def settings_of(
    opened: MoeModel,
    preset: str | Preset,
    budget: str,
    *,
    link: str,
    fused: bool = True,
    policies: dict[str, str] | None = None,
    scope: str | None = None,
    decide: str = HOST,
) -> Settings:
    """Settings of a row; a budget below one expert a layer has global scope."""
    has_few = (
        sizes.budget_nbytes(budget, opened.shape)
        < opened.shape.num_layers * opened.shape.expert_nbytes
    )
    return Settings(
        preset,
        policies or {},
        budget=budget,
        scope=str(Scope.GLOBAL) if has_few else scope,
        link=link,
        experts=experts_by(opened.model.device) if fused else EXACT,
        decide=decide,
    )


def session_row(
    opened: MoeModel,
    settings: Settings,
    text: Text,
    rates: Rates,
    *,
    artefacts: Artefacts | None = None,
) -> Row:
    """A row of moectl, with experts over the machine's link or an emulated one."""
    from profilers.compare.quality import read

    with Session(opened, settings, artefacts=artefacts) as session:
        read(session, text.sequences[:1], prefill=text.prompt)
        reading = read(session, text.sequences[1:], prefill=text.prompt)
        totals = _decoded(session, text)
        receipt = session.receipt()
    moved = (totals["demand_bytes"] + totals["prefetch_bytes"]) / text.num_decoded
    moving_s = moved / rates.link
    return Row(
        "moectl",
        _budget(settings),
        ttft_ms=_mean_ms(reading.prefill_s),
        tpot_ms=_mean_ms(reading.decode_s),
        moved_nbytes=moved,
        stall_ms=sum(reading.stall_s) / text.num_decoded * 1e3,
        link_utilisation=moving_s / statistics.fmean(reading.decode_s),
        hit_rate=hit_rate(totals),
        floor_ms=max(moving_s, active_nbytes(opened) / rates.memory) * 1e3,
        fast_nbytes=receipt["fast_bytes"],
        experts=_experts(receipt),
    )


def prompt_row(
    opened: MoeModel, settings: Settings, prompts: list[np.ndarray], rates: Rates
) -> Row:
    """Return a row of moectl on prompts; the first prompt warms up. The floor counts each wanted
    expert once and no arithmetic."""
    from tools.gpu.timing import finish

    device = opened.model.device
    seconds = []
    stall_s = []
    with Session(opened, settings) as session:
        for ids in prompts:
            begin_s = time.perf_counter()
            session.new_requests(1)
            session.forward(torch.from_numpy(ids)[None])
            finish(str(device))
            seconds.append(time.perf_counter() - begin_s)
            stall_s.append(session.engine.stall_s[-1])
        totals = session.controller.counters.totals(first_pass=1)
        receipt = session.receipt()
    count = len(prompts) - 1
    shape = opened.shape
    moved = (totals["demand_bytes"] + totals["prefetch_bytes"]) / count
    dense = active_nbytes(opened) - shape.num_layers * shape.top_k * shape.expert_nbytes
    read_s = (totals["requests"] / count * shape.expert_nbytes + dense) / rates.memory
    return Row(
        "moectl",
        _budget(settings),
        ttft_ms=_mean_ms(tuple(seconds[1:])),
        moved_nbytes=moved,
        stall_ms=statistics.fmean(stall_s[1:]) * 1e3,
        link_utilisation=moved / rates.link / statistics.fmean(seconds[1:]),
        hit_rate=hit_rate(totals),
        floor_ms=max(moved / rates.link, read_s) * 1e3,
        fast_nbytes=receipt["fast_bytes"],
        experts=_experts(receipt),
    )


def _experts(receipt: dict) -> str:
    """Return the backend that computes experts, and whether tokens were replayed as CUDA graphs."""
    return receipt["experts_of_a_token"] + (", graphs" if receipt["captured"].get("tokens") else "")


def _budget(settings: Settings) -> str:
    return (
        f"{settings.budget}, all layers together"
        if settings.scope == Scope.GLOBAL
        else settings.budget
    )


def accelerate_row(
    opened: MoeModel, folder: Path, budget: str, text: Text, *, device: str, threads: int
) -> Row:
    """A row of Accelerate with equal bytes of experts on the device and the rest on the host, in
    its own process."""
    from profilers.compare.peers import PEERS, PeerTask, read_apart

    others = sum(one.nbytes for one in opened.model.parameters() if not one.is_meta)
    room = others + sizes.budget_nbytes(budget, opened.shape)
    # its tokens are ten times as slow
    few = tuple(ids[: text.prompt + 4] for ids in text.sequences[:1])
    found = read_apart(
        PeerTask(PEERS["accelerate-cpu"], folder, device, threads, few, text.prompt, room)
    )
    return Row(
        "Accelerate, CPU offload",
        budget,
        ttft_ms=_mean_ms(found.reading.prefill_s),
        tpot_ms=_mean_ms(found.reading.decode_s),
        fast_nbytes=found.expert_nbytes,
        experts=PEERS["accelerate-cpu"].experts,
    )


def _decoded(session: Session, text: Text) -> dict[str, int]:
    """Counters of the decode passes of all sequences but the first."""
    counters = session.controller.counters
    length = len(text.sequences[0]) - text.prompt + 1
    counters.catch_up()
    decode = [one for number, one in enumerate(counters.passes[length:]) if number % length]
    assert len(decode) == text.num_decoded, (len(decode), text.num_decoded)
    table = sum(decode)
    return {counter.name.lower(): int(table[counter].sum()) for counter in Counter}


def _median_s(work: Callable[[], object], device: str, *, turns: int = 8) -> float:
    from tools.gpu.timing import finish

    seconds = []
    for _ in range(turns):
        begin_s = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds)


def _mean_ms(seconds: tuple[float, ...]) -> float:
    return statistics.fmean(seconds) * 1e3
