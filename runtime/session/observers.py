"""Observers of a session, which are told of every pass and every step: a recorder, or what solves a split anew."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from runtime.control.resplit import Reconfiguration, tokens_between
from runtime.engine.routers import Watcher
from runtime.policies.base import FastTier
from runtime.policies.step import Step
from runtime.session.parts import Parts


class Observer(Protocol):
    """What can be told of every pass and every step, such as a Recorder."""

    def begin_pass(self, requests: np.ndarray) -> None: ...

    def add(self, step: Step) -> None: ...


def observe(watcher: Watcher, observer: Observer) -> None:
    """Tell `observer` of every pass and step from here on, after those that are told already."""
    watcher.on_pass = _both(watcher.on_pass, observer.begin_pass)
    watcher.on_step = _both(watcher.on_step, observer.add)


def _both(first: Callable[[Any], None] | None, second: Callable[[Any], None]) -> Callable[[Any], None]:
    if first is None:
        return second

    def call_both(argument: Any) -> None:
        first(argument)
        second(argument)

    return call_both


def reconfiguration(parts: Parts, *, lay_out: Callable[[FastTier], None]) -> Reconfiguration | None:
    """What solves the split anew as the run goes on, if that is to happen; it observes every step. Raises BadUsage."""
    every = tokens_between(
        parts.settings.reconfigure_every, parts.fast.split, parts.policies, num_devices=parts.settings.devices
    )
    if not every:
        return None
    solver = Reconfiguration(parts.policies, parts.opened.shape, parts.fast.split, every=every, lay_out=lay_out)
    observe(parts.watcher, solver)
    return solver
