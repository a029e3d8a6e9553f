"""Decoded tokens replayed as CUDA graphs and the same launched one by one, in turns, by each way to
know where experts are: milliseconds a token, the milliseconds of the token that was captured, and
whether both said and counted the same. A token that is a single graph also has its time by the
device's clock, once its experts are there.

python -m tools.gpu.probes.captured
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from runtime.model.open import MoeModel
from runtime.session.session import Session, Settings
from runtime.session.settings import DEVICE
from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed
from tools.gpu.probes.road import PROMPT, Decoded, decode, median_ms
from tools.gpu.probes.small_model import settings_of, small_olmoe
from tools.gpu.timing import device_microseconds

TOKENS = 24
ROUNDS = 2
CALLS = 20
LAYERS = 4
ALIKE = {
    torch.float32: 1e-5,
    torch.bfloat16: 5e-2,
}  # of the largest logit: attention is summed over a longer row


@dataclass(slots=True)
class Compared:
    """Runs of a way, round by round, and the receipt of the last replayed run."""

    replayed: list[Decoded] = field(default_factory=list)
    singly: list[Decoded] = field(default_factory=list)
    receipt: dict[str, object] = field(default_factory=dict)
    device_us: float | None = None


def main() -> None:
    options = parsed(__doc__)
    tokens, rounds = (4, 1) if options.tiny else (TOKENS, ROUNDS)
    with small_olmoe(options, layers=LAYERS, length=PROMPT + tokens) as (opened, ids):
        for way, settings in ways(options.device).items():
            found = compared(opened, settings, ids, rounds=rounds)
            for line in lines(way, found, ALIKE.get(opened.dtype, 5e-2)):
                tell(**line)


def ways(device: str) -> dict[str, Settings]:
    """Return settings by the side that decides, the host or the device; on a CPU the device
    cannot."""
    host = settings_of(device)
    own = {}
    if device != "cpu":
        own["the device decides"] = decides = replace(host, decide=DEVICE)
        own["the device decides, next gate"] = replace(
            decides, policies={"prefetch": "next_gate"}, window="64MB"
        )
    return {"the host decides": host, **own, "all resident": replace(host, preset="full")}


def compared(opened: MoeModel, settings: Settings, ids: np.ndarray, *, rounds: int) -> Compared:
    """Decode with and without graphs, once in each round."""
    found = Compared()
    for _ in range(rounds):
        with Session(opened, settings) as session:
            if session.engine.captured:
                session.engine.captured.stop()
            found.singly.append(decode(session, ids))
        with Session(opened, settings) as session:
            if session.engine.captured:
                found.replayed.append(decode(session, ids))
                found.receipt = session.receipt()["captured"]
                found.device_us = _device_us(session)
    return found


def _device_us(session: Session) -> float | None:
    """Microseconds of the last token's graph, if it was one; the experts that it needs are there by
    now."""
    captured = session.engine.captured
    device = str(session.opened.model.device)
    asks_host = captured.receipt()["road"] in ("host", "seams")
    return None if asks_host else device_microseconds(captured.queue_again, CALLS, device)


def lines(way: str, found: Compared, allowed: float) -> Iterator[dict[str, object]]:
    """Yield the lines to print: one for each kind of launch, and one that compares both."""
    yield {"name": f"{way}, launched one by one", "ms_per_token": median_ms(found.singly)}
    if not found.replayed:
        yield {"name": f"{way}, as graphs", "detail": "there are no CUDA graphs here"}
        return
    told = {"capture_ms": max(max(run.ms) for run in found.replayed)} | found.receipt
    told |= {"device_us": found.device_us} if found.device_us else {}
    yield {
        "name": f"{way}, as graphs",
        "ms_per_token": median_ms(found.replayed),
        "detail": told.pop("why_not"),
        **told,
    }
    pairs = [*zip(found.replayed, found.singly, strict=True)]
    error = max(
        ((one.logits - two.logits).abs().max() / two.logits.abs().max()).item()
        for one, two in pairs
    )
    counts_alike = all(one.counters == two.counters for one, two in pairs)
    # other bits, other routes
    passed = error <= allowed and (counts_alike or error > 0) and bool(told["tokens"])
    detail = f"counters {'equal' if counts_alike else 'DIFFER'}"
    ratio = median_ms(found.singly) / median_ms(found.replayed)
    yield {
        "name": f"{way}, both",
        "passed": passed,
        "detail": detail,
        "relative": error,
        "times_as_fast": ratio,
    }


if __name__ == "__main__":
    main()
