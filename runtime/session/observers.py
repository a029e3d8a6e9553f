"""Observers of every pass and every step of a session: a recorder, and the solver of a new
split."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from runtime.control.resplit import Reconfiguration, tokens_between
from runtime.engine.routers import Watcher
from runtime.policies.base import FastTier
from runtime.policies.step import Step
from runtime.session.parts import Parts


class StepObserver(Protocol):
    """Receiver of every pass and every step, such as a Recorder."""

    def begin_pass(self, requests: np.ndarray) -> None: ...

    def add(self, step: Step) -> None: ...


def observe(watcher: Watcher, observer: StepObserver) -> None:
    """Add an observer: it gets every pass and step from here on, after the observers before it."""
    watcher.on_pass = _both(watcher.on_pass, observer.begin_pass)
    watcher.on_step = _both(watcher.on_step, observer.add)


def _both(
    first: Callable[[Any], None] | None, second: Callable[[Any], None]
) -> Callable[[Any], None]:
    if first is None:
        return second

    def call_both(argument: Any) -> None:
        first(argument)
        second(argument)

    return call_both


def reconfiguration(parts: Parts, *, lay_out: Callable[[FastTier], None]) -> Reconfiguration | None:
    """Return the observer that solves the split anew between requests and calls `lay_out` with a
    changed one; None if the settings or the split exclude it. Raises BadUsage where it is asked for
    and not possible."""
    every = tokens_between(
        parts.settings.reconfigure_every,
        parts.fast.split,
        parts.policies,
        num_devices=parts.settings.devices,
    )
    if not every:
        return None
    solver = Reconfiguration(
        parts.policies, parts.opened.shape, parts.fast.split, every=every, lay_out=lay_out
    )
    observe(parts.watcher, solver)
    return solver
