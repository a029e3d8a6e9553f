"""Counters and times of a server, as JSON for the page and as text for Prometheus."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moectl.serving.scheduler import Scheduler
from moectl.serving.wire import shown
from runtime.control.controller import Controller
from runtime.control.plan import Plan

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
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
_OF_DRAFTS = {
    "drafted": "Drafts that were read.",
    "accepted": "Of them, those that were accepted.",
}
_OF_OWNER = {
    "first_tokens": "Requests that have had a first token, by their option user.",
    "generated_tokens": "Tokens generated for it.",
    "passes": "Its part of the passes.",
    "busy_seconds": "Its part of the time in passes.",
    "exposed_stall_seconds": "Its part of the time in which compute waited for the link.",
    "fetched": "Its part of the experts that were brought on demand.",
    "demand_bytes": "Its part of their bytes.",
    "prefetch_bytes": "Its part of the bytes brought ahead of use.",
}


def live(scheduler: Scheduler) -> dict[str, object]:
    """Cumulative counters, from whose differences the page computes rates, and the present
    residency."""
    controller = scheduler.session.controller
    cache = controller.cache
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
        "last_token": [_used(one, controller) for one in scheduler.tally.last_token],
        "receipt": scheduler.receipt | scheduler.session.drafting(),
    }


def _used(one: Plan | torch.Tensor, controller: Controller) -> dict[str, list[int]]:
    """Return the experts of a layer in the last pass that gave each answer a token: those in the
    fast tier, and those that were missed."""
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


def prometheus(scheduler: Scheduler, model: str) -> bytes:
    """Counters and times in the text format of Prometheus, version 0.0.4."""
    registry = CollectorRegistry()  # of this server alone
    registry.register(_Served(scheduler, model))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class _Served(Collector):
    """Reads what a scheduler has counted, whenever it is asked."""

    scheduler: Scheduler
    model: str

    def collect(self) -> Iterator[Metric]:
        tally = self.scheduler.tally
        kept = self.scheduler.kept
        said = tally.read()
        receipt = self.scheduler.receipt
        served = (self.model, self.scheduler.preset, receipt["device"])
        labels = ("model", "preset", "device")
        yield _metric(
            GaugeMetricFamily, "info", "What is served, and by which preset.", {served: 1}, *labels
        )
        for name, help_text, value in (
            ("requests_running", "Requests under way.", self.scheduler.num_running),
            ("requests_waiting", "Requests in the queue.", self.scheduler.num_waiting),
            ("fast_tier_bytes", "Experts in the fast tier.", receipt["fast_bytes"]),
            ("fast_tier_slots", "Experts that have room there.", receipt["slots"]),
            ("experts", "Experts of the model.", receipt["experts"]),
            (
                "cache_bytes",
                "Keys, values and states of running requests.",
                self.scheduler.cached_nbytes,
            ),
            ("kept_prompts_bytes", "Prompts kept for their beginnings.", kept.nbytes),
            ("kept_prompts_limit_bytes", "What these may take.", kept.most_nbytes),
        ):
            yield _metric(GaugeMetricFamily, name, help_text, {(): value})
        for name, help_text, value in (
            ("reused_prompts", "Prompts that began like an earlier one.", kept.num_reused),
            ("forgotten_prompts", "Kept prompts that had to make room.", kept.num_forgotten),
        ):
            yield _metric(CounterMetricFamily, name, help_text, {(): value})
        over = {(outcome,): count for outcome, count in said["requests"].items()}
        yield _metric(CounterMetricFamily, "requests", "Requests that are over.", over, "outcome")
        for name, help_text in _SUMS.items():
            yield _metric(CounterMetricFamily, name, help_text, {(): said[name]})
        for name, help_text in _OF_DRAFTS.items():
            value = said["counters"][name]
            yield _metric(CounterMetricFamily, f"{name}_tokens", help_text, {(): value})
        for name in said["counters"]:
            by_layer = {(layer,): counts[name] for layer, counts in enumerate(said["by_layer"])}
            yield _metric(
                CounterMetricFamily,
                f"expert_{name}",
                f"The counter {name} of moectl run.",
                by_layer,
                "layer",
            )
        for name, help_text in _OF_OWNER.items():
            sums = {
                (owner,): (counts | counts["counters"])[name]
                for owner, counts in said["owners"].items()
            }
            yield _metric(CounterMetricFamily, f"user_{name}", help_text, sums, "user")
        for histogram in (tally.waited, tally.to_first_token, tally.per_token, tally.took):
            yield from histogram.collect()


def _metric(
    kind: type[Family],
    name: str,
    help_text: str,
    values: Mapping[tuple[object, ...], float],
    *labels: str,
) -> Family:
    """Return a metric with a value for each tuple of labels."""
    family = kind(f"moectl_{name}", help_text, labels=labels)
    for of, value in values.items():
        family.add_metric([shown(str(each)) for each in of], value)
    return family
