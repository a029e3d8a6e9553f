"""Every preset, budget, batch, link, dtype and family against the plain model, and against runs
without shortcuts."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.torments import lossless
from tools.torments.cases import Lost
from tools.torments.engine_checks import check
from tools.torments.lossless import Model, Models

_NUM_TOKENS = 6


class Differential:
    """Lossless settings equal the plain model bit for bit; leaving out any optimisation changes
    nothing."""

    classes = (15,)
    share = 3.0

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        self._models = Models(ground)

    def one(self, rng: random.Random) -> str:
        model = self._models.draw(rng)
        settings = lossless.draw_settings(rng, model.opened.shape)
        left_out = rng.choice(list(_WITHOUT))
        for each, change in ((settings, _nothing), _WITHOUT[left_out](settings)):
            try:
                _compare(model, each, change, rng)
            except Lost as problem:
                raise Lost(
                    f"{problem} [{model.name}, {lossless.described(each)}, {left_out}]"
                ) from problem
        return f"{settings.preset}, {left_out}"


def _compare(
    model: Model, settings: Settings, change: Callable[[Session], None], rng: random.Random
) -> None:
    with Session(model.opened, settings) as session:
        change(session)
        is_exact = lossless.is_exact(session)
        for request in rng.sample(model.requests, 3):
            ours = lossless.said(session, request)
            wrong = lossless.differs(ours, request.logits, to_the_bit=is_exact)
            if wrong and (is_exact or model.opened.dtype is torch.float32):
                raise Lost(f"15: {wrong}")
            check(session, "a request")
        if is_exact:
            prompt = rng.choice(model.requests).prompts[:1]
            ours = [
                token.token_id
                for token in session.tokens(prompt, Sampling(_NUM_TOKENS, ignore_eos=True))
            ]
            if ours != (theirs := model.generated(prompt, _NUM_TOKENS)):
                raise Lost(f"15: {ours} generated, {theirs} by the plain model")


def _nothing(session: Session) -> None:
    """Change nothing."""


def _without_short_cuts(session: Session) -> None:
    """Decide and compute every step without shortcuts."""
    steps = session.engine.steps
    steps.can_skip_planning = False
    steps.backend._batched = None


def _with(
    policies: dict[str, str], **settings: object
) -> Callable[[Settings], tuple[Settings, Callable]]:
    def change(settings_: Settings) -> tuple[Settings, Callable]:
        return replace(settings_, policies=settings_.policies | policies, **settings), _nothing

    return change


_WITHOUT: dict[str, Callable[[Settings], tuple[Settings, Callable[[Session], None]]]] = {
    "without short cuts": lambda settings: (settings, _without_short_cuts),
    "without prefetching": lambda settings: (
        settings
        if settings.learn
        else replace(settings, policies=settings.policies | {"prefetch": "none"}),
        _nothing,
    ),
    "without a window": _with({}, window="0B"),
    "without an eviction policy": _with({"eviction": "random"}),
    "without paces": _with({}, link="disk", near=None),
    "recorded": lambda settings: (settings, lambda session: session.record()),
    "by compiled kernels": _with({}, experts="fused"),
    "by compiled kernels, with room for all": _with({}, experts="fused", budget="100%"),
    "with room for all": lambda settings: (replace(settings, budget="100%"), _nothing),
}
