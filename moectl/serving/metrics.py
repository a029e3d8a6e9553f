"""Counters of a server, as JSON for the page and as text for Prometheus."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from moectl.serving.scheduler import Scheduler
from moectl.serving.wire import shown
from runtime.control.controller import Controller
from runtime.control.plan import Plan

_SUMS = {
    "prompt_tokens": "Tokens of prompts whose answer has begun.",
    "cached_tokens": "Of them, those known from an earlier prompt that begins alike.",
    "generated_tokens": "Tokens generated.",
    "passes": "Forward passes of the model.",
    "busy_seconds": "Time in passes.",
    "exposed_stall_seconds": "Time in which compute waited for the link.",
    "first_tokens": "Requests that have had a first token.",
    "to_first_token_seconds": "Time from the arrival of these to it, together.",
}
_OF_OWNER = {
    "first_tokens": "Requests that have had a first token, by their option user.",
    "generated_tokens": "Tokens generated for it.",
    "busy_seconds": "Its part of the time in passes.",
    "exposed_stall_seconds": "Its part of the time in which compute waited for the link.",
    "fetched": "Its part of the experts that were brought on demand.",
    "demand_bytes": "Its part of their bytes.",
    "prefetch_bytes": "Its part of the bytes brought ahead of use.",
}


def live(scheduler: Scheduler) -> dict[str, object]:
    """Cumulative counters, from whose differences the page computes rates, and the present
    residency."""
    cache = scheduler.session.controller.cache
    shape = scheduler.session.opened.shape
    # One string for each layer with a digit for each expert: 0 absent, 1 loading, 2 resident.
    residency = [
        "".join(map(str, cache.layer_states(layer).tolist())) for layer in range(shape.num_layers)
    ]
    return scheduler.tally.read() | {
        "preset": scheduler.preset,
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "kept_prompts": asdict(scheduler.kept),
        "slots": cache.num_slots,
        "residency": residency,
        "last_token": _last_token(scheduler),
        "receipt": scheduler.receipt,
    }


def _last_token(scheduler: Scheduler) -> list[dict[str, list[int]]]:
    """Return by layer the experts of the last pass that gave each answer a token: those in the fast
    tier, and those that were missed."""
    controller = scheduler.session.controller
    return [_used(one, controller) for one in scheduler.tally.last_token]


def _used(one: Plan | torch.Tensor, controller: Controller) -> dict[str, list[int]]:
    if not isinstance(one, Plan):
        experts = one[0].tolist()
        none = []
        return (
            {"hit": none, "missed": experts}
            if controller.holds_low
            else {"hit": experts, "missed": none}
        )
    elsewhere = (*one.near, *one.low, *(place for wave in one.waves for place in wave.loads))
    used = set(one.selected.ravel().tolist()) - {-1}
    missed = used & {place.key % controller.shape.num_experts for place in elsewhere}
    return {"hit": sorted(used - missed), "missed": sorted(missed)}


def prometheus(scheduler: Scheduler, model: str) -> str:
    """Counters in the Prometheus text format, version 0.0.4."""
    return "".join(f"{line}\n" for line in _lines(scheduler, model))


def _lines(scheduler: Scheduler, model: str) -> Iterator[str]:
    said = scheduler.tally.read()
    labels = {"model": model, "preset": scheduler.preset, "device": scheduler.receipt["device"]}
    yield from _metric(
        "info", "gauge", "What is served, and by which preset.", {_labels(labels): 1}
    )
    yield from _metric(
        "requests_running", "gauge", "Requests under way.", {"": scheduler.num_running}
    )
    yield from _metric(
        "requests_waiting", "gauge", "Requests in the queue.", {"": scheduler.num_waiting}
    )
    kept = scheduler.kept
    yield from _metric(
        "kept_prompts_bytes", "gauge", "Prompts kept for their beginnings.", {"": kept.nbytes}
    )
    yield from _metric(
        "kept_prompts_limit_bytes", "gauge", "What these may take.", {"": kept.most_nbytes}
    )
    over = {_labels({"outcome": name}): count for name, count in said["requests"].items()}
    yield from _metric("requests_total", "counter", "Requests that are over.", over)
    for name, help_text in _SUMS.items():
        yield from _metric(f"{name}_total", "counter", help_text, {"": said[name]})
    for name in said["counters"]:
        values = {
            _labels({"layer": layer}): counts[name] for layer, counts in enumerate(said["by_layer"])
        }
        yield from _metric(
            f"expert_{name}_total", "counter", f"The counter {name} of moectl run.", values
        )
    yield from _of_owners(said["owners"])


def _of_owners(owners: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    sums = {name: {**said, **said["counters"]} for name, said in owners.items()}
    for name, help_text in _OF_OWNER.items():
        values = {_labels({"user": owner}): said[name] for owner, said in sums.items()}
        yield from _metric(f"user_{name}_total", "counter", help_text, values)


def _metric(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP moectl_{name} {help_text}"
    yield f"# TYPE moectl_{name} {kind}"
    for labels, value in values.items():
        yield f"moectl_{name}{labels} {value}"


def _labels(values: Mapping[str, object]) -> str:
    return (
        "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items()) + "}"
    )


def _escaped(text: str) -> str:
    return shown(text).replace("\\", "\\\\").replace('"', '\\"')
