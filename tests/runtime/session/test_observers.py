"""Observers get every pass and step, each after those before it."""

from types import SimpleNamespace

import pytest

from runtime.session import parts as module
from runtime.session.parts import observe, reconfiguration


class Heard:
    def __init__(self, name: str, told: list) -> None:
        self._name = name
        self._told = told

    def begin_pass(self, requests: object) -> None:
        self._told.append((self._name, "pass", requests))

    def add(self, step: object) -> None:
        self._told.append((self._name, "step", step))

    def settle(self, rejected: object, num_again: int) -> None:
        self._told.append((self._name, "settle", rejected))


def test_observers_are_called_in_the_order_in_which_they_came() -> None:
    told: list = []
    watcher = SimpleNamespace(on_pass=None, on_step=None, on_settle=None)
    for name in ("first", "second", "third"):
        observe(watcher, Heard(name, told))
    watcher.on_pass(1)
    watcher.on_step(2)
    watcher.on_settle(3, 0)
    assert told == [
        (name, *what)
        for what in (("pass", 1), ("step", 2), ("settle", 3))
        for name in ("first", "second", "third")
    ]


@pytest.mark.parametrize("every", [0, 500])
def test_a_split_is_solved_anew_only_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    told: list = []
    monkeypatch.setattr(
        module, "tokens_between", lambda asked, split, policies, *, num_devices: every
    )
    monkeypatch.setattr(
        module, "Reconfiguration", lambda *given, every, lay_out: Heard(f"every {every}", told)
    )
    settings = SimpleNamespace(reconfigure_every=None, devices=1)
    parts = SimpleNamespace(
        settings=settings,
        fast=SimpleNamespace(split=None),
        policies=None,
        opened=SimpleNamespace(shape=None),
        watcher=SimpleNamespace(on_pass=None, on_step=None, on_settle=None),
    )
    made = reconfiguration(parts, lay_out=print)
    assert (made is None) == (every == 0) == (parts.watcher.on_step is None)
    if made:
        parts.watcher.on_step(7)
        assert told == [("every 500", "step", 7)]
