"""Checks of sessions: overlap, bandwidth and speed, each a function of a device.

moectl is imported only when a check runs: an incompatible transformers then fails that check by
name, and the others go on.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.gpu.timing import finish

RUNS = {
    "25%": {"budget": "25%"},
    "one expert a layer": {"budget": "{layers}x"},
    "everything resident": {"preset": "full"},
    "25%, prefetched": {"budget": "25%", "policies": {"prefetch": "next_gate"}},
    "25%, least-stale over all layers": {
        "budget": "25%",
        "scope": "global",
        "policies": {"prefetch": "next_gate", "eviction": "least_stale"},
    },
    "25%, near on the host": {"preset": "near", "budget": "25%"},
    "everything resident, fused": {"preset": "full", "experts": "fused"},
    "25%, prefetched, fused": {
        "budget": "25%",
        "policies": {"prefetch": "next_gate"},
        "experts": "fused",
    },
    "25%, near on the host, fused": {"preset": "near", "budget": "25%", "experts": "fused"},
    "25%, brought behind, fused": {"preset": "behind", "budget": "25%", "experts": "fused"},
    "25%, cut in two, fused": {
        "budget": "25%",
        "policies": {"residency": "split:theta=0.5", "prefetch": "next_gate"},
        "experts": "fused",
    },
    "25%, decided on the device": {"budget": "25%", "experts": "fused", "decide": "device"},
    "25%, decided and prefetched on the device": {
        "budget": "25%",
        "policies": {"prefetch": "next_gate", "eviction": "late_horizon"},
        "experts": "fused",
        "decide": "device",
    },
}


@dataclass(frozen=True, slots=True)
class Check:
    """One result; `detail` is one line for readers, `figures` are for programs."""

    name: str
    passed: bool
    detail: str
    figures: dict = field(default_factory=dict)


Finding = tuple[bool, str, dict]


def attempt(name: str, check: Callable[[], Finding]) -> Check:
    """The result of the check, or its failure to run, so that an error does not hide other
    checks."""
    try:
        return Check(name, *check())
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return Check(name, False, f"{type(error).__name__}: {first}"[:300])


def save_random(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **shape: int
) -> Path:
    """Save a random OLMoE in `folder` unless it exists; made on `device`, since random numbers are
    slow on a CPU."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        with torch.device(device):
            model = OlmoeForCausalLM(OlmoeConfig(**shape)).to(dtype)
        model.config.dtype = dtype
        model.save_pretrained(folder)
    return folder


SMALL = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGE = SMALL | {
    "vocab_size": 2048,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def bandwidth(device: str, *, nbytes: int = 256 << 20) -> Finding:
    """Host-to-device GB/s, pinned and pageable; passed if pinned is faster."""
    pinned, pageable = (_copy_gbps(device, nbytes, pin=pin) for pin in (True, False))
    detail = f"host to device: {pinned:.1f} GB/s pinned, {pageable:.1f} GB/s pageable"
    return pinned >= 0.9 * pageable, detail, {"pinned_gbps": pinned, "pageable_gbps": pageable}


def _copy_gbps(device: str, nbytes: int, *, pin: bool, turns: int = 8) -> float:
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin and device != "cpu")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(turns):
        begin_s = time.perf_counter()
        target.copy_(host, non_blocking=True)
        finish(device)
        seconds.append(time.perf_counter() - begin_s)
    return nbytes / statistics.median(seconds) / 1e9


def stock_speed(folder: Path, device: str, *, tokens: int) -> Finding:
    """Return milliseconds a token of each stock implementation; implementations that do not run
    here are named instead."""
    from tools.bench.decoding.resident import STOCK, decode_seconds, plain_model

    model = plain_model(folder, device=device)
    figures = {}
    failed = []
    for implementation in STOCK:
        try:
            model.set_experts_implementation(implementation)
            figures[implementation] = _ms(decode_seconds(model, _ids(model, tokens)))
        except (
            RuntimeError,
            NotImplementedError,
            ValueError,
        ) as error:  # raised by kernels without a device
            failed.append(f"{implementation} does not run: {str(error).splitlines()[0]}")
    told = [f"{name} {ms:.2f} ms/token" for name, ms in figures.items()]
    return "eager" in figures, "; ".join(told + failed), figures


def session_speed(folder: Path, device: str, run: str, *, tokens: int) -> Finding:
    """Decode with `run`: time per token, and the share of copy time hidden behind compute.

    `hidden_share` is 1 - exposed stall / copy time, measured by events of the compute stream and of
    the copy stream.
    """
    from runtime.control.counters import hit_rate
    from runtime.model.open import open_model
    from runtime.session.session import Session, Settings
    from tools.bench.decoding.resident import decode_seconds

    opened = open_model(str(folder), device=device)
    with Session(opened, Settings(**RUNS[run])) as session:
        link = session.parts.tiers.link
        stalls = session.engine.stall_s
        ids = _ids(opened.model, tokens)
        decode_seconds(opened.model, ids)  # fills the tier
        marks: list[tuple[int, float]] = []
        seconds = decode_seconds(
            opened.model, ids, after_prompt=lambda: marks.append((len(stalls), link.copy_s))
        )
        rates = {name: rate for name, rate in link.conditions().items() if name.endswith("gbps")}
        first_pass, copied_s = marks[0]
        copy_ms = (link.copy_s - copied_s) / tokens * 1e3
        stall_ms = sum(stalls[first_pass:]) / tokens * 1e3
        rate = hit_rate(session.controller.counters.totals(first_pass=first_pass))
        receipt = session.receipt()
    opened.store.close()
    hidden = max(0.0, 1 - stall_ms / copy_ms) if copy_ms else 1.0
    figures = {
        "ms_per_token": _ms(seconds),
        "copy_ms_per_token": copy_ms,
        "exposed_ms_per_token": stall_ms,
        "hidden_share": hidden,
        "hit_rate": rate,
        "receipt": receipt,
        **rates,
    }
    copies = f"copies {copy_ms:.2f} ms, {hidden:.0%} of it hidden"
    return True, f"{_ms(seconds):.2f} ms/token; {copies}; hit rate {rate:.2f}", figures


def _ids(model: torch.nn.Module, tokens: int) -> torch.Tensor:
    from tools.bench.decoding.resident import PROMPT

    random = torch.Generator().manual_seed(2)
    return torch.randint(3, model.config.vocab_size, (1, PROMPT + tokens), generator=random).to(
        model.device
    )


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def compared(checks: dict[str, Check]) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Results from two measurements: prefetching hides copy time; resident experts run as fast as
    eager."""

    def hides() -> Finding:
        alone, ahead = (checks[name].figures["hidden_share"] for name in ("25%", "25%, prefetched"))
        return (
            0 < ahead >= alone,
            f"copy time hidden: {ahead:.0%} with prefetching, {alone:.0%} without",
            {},
        )

    def keeps_up() -> Finding:
        own = checks["everything resident"].figures["ms_per_token"]
        stock = checks["stock"].figures
        ratios = {name: own / ms for name, ms in stock.items()}
        told = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in ratios.items())
        return ratios["eager"] <= 1.05, f"resident, time per token: {told}", {"ratios": ratios}

    yield "overlap", hides
    yield "speed", keeps_up
