"""The cost of an answer: in one line, in tables, or as one JSON object."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from moectl.show.counters import counters_sheet, devices_sheet
from moectl.show.render import Sheet, human_bytes, show_sheet
from runtime.control.counters import AT_BITS, by_layer, hit_rate, totals

if TYPE_CHECKING:
    from runtime.session.generation.charges import Charge
    from runtime.session.generation.stream import Answer, Effort, TokenTiming


def in_a_line(answer: "Answer", *, load_s: float | None = None) -> str:
    """Speed, hits, stall, preset with its share of the experts, and the seconds of loading."""
    effort = answer.effort
    receipt = answer.receipt
    slots = receipt["slots"]
    experts = receipt["experts"]
    speed = (
        f"{1e3 / answer.tpot_ms:.1f} tokens/s"
        if answer.tpot_ms
        else f"{len(answer.token_ids)} token"
    )
    parts = [
        f"{speed}, first {_time(answer.ttft_ms)}",
        *waits(effort.counters, effort.exposed_ms),
        *drafts(effort.counters),
        f"{receipt['preset']} {100 * slots / experts:.3g}%",
    ]
    return "; ".join([*parts, *([f"load {load_s:.1f} s"] if load_s is not None else [])])


def in_a_line_of_many(
    num_tokens: int, timing: "TokenTiming", charge: "Charge", *, num_passes: int
) -> str:
    """Tokens, speed, hits and stall of a request that took part in `num_passes` passes, and its
    share of them."""
    each = f", {1e3 / timing.tpot_ms:.1f} tokens/s" if timing.tpot_ms else ""
    counters = totals(by_layer(charge.counters))
    parts = [
        f"{num_tokens} tokens{each}, first {_time(timing.ttft_ms)}",
        *waits(counters, charge.exposed_s * 1e3),
        *drafts(counters),
        f"{charge.passes:.3g} of {num_passes} passes",
    ]
    return "; ".join(parts)


def waits(counters: Mapping[str, float], exposed_ms: float) -> tuple[str, str]:
    """Return the hits and the stall, in words."""
    return f"hits {100 * hit_rate(counters):.0f}%", f"stall {_time(exposed_ms)}"


def drafts(counters: Mapping[str, float]) -> tuple[str, ...]:
    """Return how many drafts were accepted, in words; nothing where there were none."""
    drafted = counters["drafted"]
    return (f"{counters['accepted']:.0f} of {drafted:.0f} drafts accepted",) if drafted else ()


def tell_fallbacks(fallbacks: Iterable[str]) -> None:
    """Print on stderr, a line each, what is not done as it was asked for."""
    for fallback in fallbacks:
        print(f"note: {fallback}", file=sys.stderr)


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"


def everything(answer: "Answer") -> dict[str, object]:
    """The one object of `--json`."""
    return {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "counters": answer.effort.counters | {"exposed_ms": answer.effort.exposed_ms},
        "by_layer": answer.effort.by_layer,
        "receipt": answer.receipt,
        "ttft_ms": answer.ttft_ms,
        "tpot_ms": answer.tpot_ms,
    }


def show_details(
    effort: "Effort", receipt: dict[str, object], *, answer: "Answer | None" = None
) -> None:
    """Print counters by layer and the receipt; several devices have a table of their own."""
    print()
    show_sheet(counters_sheet(effort, note=took(answer) if answer else ""))
    if devices := receipt["devices"]:
        show_sheet(devices_sheet(devices))
    others = {name: value for name, value in receipt.items() if name != "devices"}
    show_sheet(Sheet("Receipt", ("what", "in force"), list(_flat(others))))


def took(answer: "Answer") -> str:
    """Describe the cost of an answer, with the bytes that moved and what it lost."""
    counts = answer.effort.counters
    return (
        f"{len(answer.token_ids)} tokens; first after {answer.ttft_ms:.1f} ms, then "
        f"{answer.tpot_ms:.2f} ms each; {human_bytes(counts['demand_bytes'])} on demand, "
        f"{human_bytes(counts['prefetch_bytes'])} prefetched "
        f"({human_bytes(counts['wasted_bytes'])} of it wasted), {answer.effort.exposed_ms:.1f} ms "
        f"of stall; {counts['replaced_ranks']} ranks replaced, {counts['dropped_ranks']} "
        f"dropped{_few_bits(counts)}"
    )


def _few_bits(counts: dict[str, int]) -> str:
    """Return how many experts were computed below full precision, empty if none were."""
    at = [(bits, counts[name]) for bits, name in AT_BITS.items() if counts[name]]
    return "".join(
        f"; {count} experts at {bits} {'bit' if bits == 1 else 'bits'}" for bits, count in at
    )


def _flat(values: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, [], {}):
            yield (
                f"{prefix}{name}",
                "; ".join(map(str, value)) if isinstance(value, list) else value,
            )
