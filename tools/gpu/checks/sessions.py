"""Checks of sessions: exactness, overlap, bandwidth and speed, each a function of a device.

moectl is imported only when a check runs: an incompatible transformers then fails that check by name, and the others
go on.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from tools.gpu.timing import finish

NUM_DECODED, NUM_GREEDY = 6, 12
FETCHED, COMPUTED_ELSEWHERE = 1e-5, 1e-4  # relative in float32: the same kernels, those of the host, or our own
COARSE = 5e-2  # relative in bfloat16, where another rounding may change a router's selection
NO_WORSE = 1.5  # times plain bfloat16's own distance from float32, for kernels that round elsewhere
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
    "25%, prefetched, fused": {"budget": "25%", "policies": {"prefetch": "next_gate"}, "experts": "fused"},
    "25%, cut in two, fused": {
        "budget": "25%",
        "policies": {"residency": "split:theta=0.5", "prefetch": "next_gate"},
        "experts": "fused",
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
    """The result of the check, or its failure to run, so that an error does not hide other checks."""
    try:
        return Check(name, *check())
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return Check(name, False, f"{type(error).__name__}: {first}"[:300])


def save_random(folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **shape: int) -> Path:
    """Save a random OLMoE in `folder` unless it exists; made on `device`, since random numbers are slow on a CPU."""
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


# Exactness


@dataclass(frozen=True, slots=True)
class Said:
    """Outputs of a model: logits of a prompt, of a batch and of decoded tokens, and its greedy tokens."""

    logits: tuple[torch.Tensor, ...]
    tokens: list[int]


@torch.inference_mode()
def listen(model: torch.nn.Module, vocabulary: int) -> Said:
    """Compute the outputs of a model, plain or offloaded."""
    device = model.device
    ids = torch.randint(3, vocabulary, (3, 24), generator=torch.Generator().manual_seed(1)).to(device)
    prompt = model(input_ids=ids[:1], use_cache=True)
    logits, past = [prompt.logits, model(input_ids=ids).logits], prompt.past_key_values
    for position in range(NUM_DECODED):
        step = model(input_ids=ids[1:2, position : position + 1], past_key_values=past, use_cache=True)
        logits.append(step.logits)
    chosen = model.generate(
        ids[:1],
        attention_mask=torch.ones_like(ids[:1]),
        max_new_tokens=NUM_GREEDY,
        min_new_tokens=NUM_GREEDY,
        do_sample=False,
    )
    return Said(tuple(each.float().cpu() for each in logits), chosen[0, ids.shape[1] :].tolist())


def plain(folder: Path, dtype: torch.dtype, device: str) -> Said:
    """Outputs of transformers' eager implementation."""
    from tools.bench.resident import plain_model

    model = plain_model(folder, dtype=dtype, device=device)
    return listen(model, model.config.vocab_size)


def exactness(
    checkpoint: Callable[[], Path], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """A check for each run: logits and greedy tokens of the offloaded and of the plain model on the same device."""
    theirs = cache(lambda: plain(checkpoint(), dtype, device))
    exact = cache(lambda: plain(checkpoint(), torch.float32, device))

    def check(name: str) -> Finding:
        ours = offloaded(checkpoint(), dtype, device, RUNS[name])
        if "near" not in name and "experts" not in RUNS[name]:
            return compare(ours, theirs(), dtype)
        if dtype is torch.float32:
            return compare(ours, theirs(), dtype, allowed=COMPUTED_ELSEWHERE)
        return compare_rounded(ours, theirs(), exact())

    for name in RUNS:
        yield name, lambda name=name: check(name)


def offloaded(folder: Path, dtype: torch.dtype, device: str, run: dict) -> Said:
    from runtime.model.open import open_model
    from runtime.session.session import Session, Settings

    opened = open_model(str(folder), dtype=dtype, device=device)
    budget = run.get("budget", "25%").format(layers=opened.shape.num_layers)
    with Session(opened, Settings(**run | {"budget": budget})) as session:
        said = listen(opened.model, opened.config.vocab_size)
        session.controller.cache.validate()
    opened.store.close()
    return said


def compare(ours: Said, theirs: Said, dtype: torch.dtype, *, allowed: float | None = None) -> Finding:
    """Passed if the difference of logits is `allowed`, by default what is for torch's own kernels, and tokens are
    equal."""
    allowed = allowed or (FETCHED if dtype is torch.float32 else COARSE)
    is_equal = all(torch.equal(*pair) for pair in zip(ours.logits, theirs.logits, strict=True))
    relative, same_tokens = difference(ours, theirs), ours.tokens == theirs.tokens
    told = "bit-equal" if is_equal else f"largest difference {relative:.1e} of the largest logit"
    detail = f"{told}; greedy tokens {'equal' if same_tokens else 'DIFFER'}"
    figures = {"bit_equal": is_equal, "relative": relative, "tokens_equal": same_tokens, "allowed": allowed}
    return relative <= allowed and same_tokens, detail, figures


def compare_rounded(ours: Said, theirs: Said, exact: Said) -> Finding:
    """Passed if logits of kernels that round elsewhere in bfloat16 are about as near to those of float32 as the plain
    model's: a rounding may change a router's selection, and then either may be the nearer one. Tokens may differ."""
    relative, own, plain_own = difference(ours, theirs), difference(ours, exact), difference(theirs, exact)
    allowed = max(COARSE, NO_WORSE * plain_own)
    detail = f"{own:.1e} from float32's logits, the plain model {plain_own:.1e}; from each other {relative:.1e}"
    figures = {"bit_equal": not relative, "relative": relative, "from_float32": own, "plain_from_float32": plain_own}
    return own <= allowed, detail, figures | {"tokens_equal": ours.tokens == theirs.tokens, "allowed": allowed}


def difference(ours: Said, theirs: Said) -> float:
    """The largest difference of logits, relative to the largest logit."""
    pairs = zip(ours.logits, theirs.logits, strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


# Speed


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
    """Milliseconds a token of each stock implementation; those that do not run here are named instead."""
    from tools.bench.resident import STOCK, decode_seconds, plain_model

    model = plain_model(folder, device=device)
    figures, failed = {}, []
    for implementation in STOCK:
        try:
            model.set_experts_implementation(implementation)
            figures[implementation] = _ms(decode_seconds(model, _ids(model, tokens)))
        except (RuntimeError, NotImplementedError, ValueError) as error:  # raised by kernels without a device
            failed.append(f"{implementation} does not run: {str(error).splitlines()[0]}")
    told = [f"{name} {ms:.2f} ms/token" for name, ms in figures.items()]
    return "eager" in figures, "; ".join(told + failed), figures


def session_speed(folder: Path, device: str, run: str, *, tokens: int) -> Finding:
    """Decode with `run`: time per token, and the share of copy time hidden behind compute.

    `hidden_share` is 1 - exposed stall / copy time, measured by events of the compute stream and of the copy stream.
    """
    from runtime.control.counters import hit_rate
    from runtime.model.open import open_model
    from runtime.session.session import Session, Settings
    from tools.bench.resident import decode_seconds

    opened = open_model(str(folder), device=device)
    with Session(opened, Settings(**RUNS[run])) as session:
        link, stalls, ids = session.parts.tiers.link, session.engine.stall_s, _ids(opened.model, tokens)
        decode_seconds(opened.model, ids)  # fills the tier
        marks: list[tuple[int, float]] = []
        seconds = decode_seconds(opened.model, ids, after_prompt=lambda: marks.append((len(stalls), link.copy_s)))
        rates = {name: rate for name, rate in link.conditions().items() if name.endswith("gbps")}
        first_pass, copied_s = marks[0]
        copy_ms, stall_ms = (link.copy_s - copied_s) / tokens * 1e3, sum(stalls[first_pass:]) / tokens * 1e3
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
    from tools.bench.resident import PROMPT

    random = torch.Generator().manual_seed(2)
    return torch.randint(3, model.config.vocab_size, (1, PROMPT + tokens), generator=random).to(model.device)


def _ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def compared(checks: dict[str, Check]) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Results from two measurements: prefetching hides copy time; resident experts run as fast as eager."""

    def hides() -> Finding:
        alone, ahead = (checks[name].figures["hidden_share"] for name in ("25%", "25%, prefetched"))
        return 0 < ahead >= alone, f"copy time hidden: {ahead:.0%} with prefetching, {alone:.0%} without", {}

    def keeps_up() -> Finding:
        own, stock = checks["everything resident"].figures["ms_per_token"], checks["stock"].figures
        ratios = {name: own / ms for name, ms in stock.items()}
        told = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in ratios.items())
        return ratios["eager"] <= 1.05, f"resident, time per token: {told}", {"ratios": ratios}

    yield "overlap", hides
    yield "speed", keeps_up
