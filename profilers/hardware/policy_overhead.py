"""Measures the overhead of policies: the seconds that a step of one token spends on observing and
deciding."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
import torch

from artifacts.errors import Problem
from artifacts.hardware.profile import EACH_LOAD
from runtime.model.open import MoeModel
from runtime.policies import POLICIES, describe, parse
from runtime.policies.base import Artefacts
from runtime.search import space
from runtime.session.link_choice import resolve_link
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT
from runtime.tiers.ram import RamStore

_PLAIN = {"prefetch": "none", "eviction": "lru"}  # policies with which others are compared
_SEARCHED = {"prefetch": space.PREFETCH, "eviction": space.EVICTION}


def deciding(
    opened: MoeModel,
    link: str,
    *,
    tokens: int,
    experts: str = EXACT,
    artefacts: Artefacts | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Return the seconds per layer that each prefetch and eviction policy takes beyond the plain
    one, by axis and text, when all experts of a token are resident. Policies have their default
    parameters and the parameters that a search tries. A policy that cannot run is left out, and so
    are all that remain when it `is_late`. `EACH_LOAD` is the time that deciding on a miss adds.
    `tokens` tokens are decoded, each twice."""
    if resolve_link(opened, link=link, near=None, scaled_to=None).kind == "emulated":
        opened = replace(opened, store=RamStore(opened.store))  # one copy for all sessions
    settings = Settings(
        budget=f"{opened.shape.num_layers * places_a_layer(opened)}x", link=link, experts=experts
    )
    settings = replace(settings, window=f"{opened.shape.top_k * opened.shape.expert_nbytes}B")
    plain_s, load_s = _step_seconds(opened, settings, artefacts, tokens)
    seconds = {EACH_LOAD: load_s}
    for axis, plain in _PLAIN.items():
        for text in dict.fromkeys(
            text for text in (*POLICIES[axis], *_SEARCHED[axis]) if text != plain
        ):
            if is_late():
                return seconds
            try:
                policy_s, _ = _step_seconds(
                    opened, replace(settings, policies={axis: text}), artefacts, tokens
                )
            except Problem:
                continue
            seconds[f"{axis} {describe(parse(axis, text))}"] = max(0.0, policy_s - plain_s)
    return seconds


def places_a_layer(opened: MoeModel) -> int:
    """Return slots per layer with which a token finds some of its experts resident and misses
    others."""
    top_k = opened.shape.top_k
    return 2 * top_k if opened.shape.num_experts >= 4 * top_k else top_k


def _step_seconds(
    opened: MoeModel, settings: Settings, artefacts: Artefacts | None, tokens: int
) -> tuple[float, float]:
    """Return the median over layers when a token is decoded again, and what each miss adds at
    first."""
    random = np.random.default_rng(0)
    resident_s = []
    added = []
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        for _ in range(tokens):
            token = torch.from_numpy(random.integers(0, opened.config.vocab_size, (1, 1)))
            first, second = (_timed(session, token) for _ in range(2))
            resident_s += second
            num_misses = misses_of(session, 2)
            added += [(sum(first) - sum(second)) / num_misses] if num_misses else []
    return median(resident_s), max(0.0, median(added)) if added else 0.0


def misses_of(session: Session, num_passes: int) -> int:
    """Return the misses of the last passes."""
    by_layer = session.controller.counters.by_layer(first_pass=-num_passes)
    return sum(layer["misses"] for layer in by_layer)


def _timed(session: Session, token: torch.Tensor) -> list[float]:
    """Return each layer's seconds for observing the router, deciding and issuing the loads."""
    owners = (
        (session.watcher, "step"),
        (session.controller, "step"),
        (session.parts.tiers.link, "issue"),
    )
    seconds: list[float] = []
    for owner, name in owners:
        setattr(
            owner, name, _timing(getattr(owner, name), seconds, begins=owner is session.watcher)
        )
    try:
        session.forward(token)
    finally:
        for owner, name in owners:
            delattr(owner, name)
    return seconds


def _timing(
    work: Callable[..., object], seconds: list[float], *, begins: bool
) -> Callable[..., object]:
    """Wrap `work` so that its time is added to the last of `seconds`, or to a new one if it
    `begins` a layer."""

    def timed(*arguments: object, **options: object) -> object:
        begin_s = perf_counter()
        answer = work(*arguments, **options)
        if begins:
            seconds.append(0.0)
        if seconds:  # what a pass brings before its first layer is no layer's
            seconds[-1] += perf_counter() - begin_s
        return answer

    return timed
