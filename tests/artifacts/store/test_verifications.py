"""Verifications come back from the store by engine and machine, and ten of them give an
interval."""

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store
from artifacts.store.verifications import (
    TABLE,
    Verification,
    interval,
    to_rows,
    verifications_of,
)

ONE = Verification("m.gguf", "ab", "llama.cpp", "b1", "here", "2 threads", 50.0, 40.0, 0.03, 7)


def test_they_come_back_by_engine_and_machine(tmp_path: Path) -> None:
    others = [replace(ONE, machine="there"), replace(ONE, engine="moectl")]
    with Store.open(tmp_path / "moe.duckdb") as store:
        for each in (ONE, *others):
            store.write_run(RunInfo("advise", None, utc_now(), 1.0), {TABLE: to_rows([each])})
        assert verifications_of(store, "llama.cpp", "here") == [ONE]
    assert ONE.error == pytest.approx(0.25)


def test_ten_give_an_interval_and_twenty_leave_the_outermost_out() -> None:
    ten = [replace(ONE, predicted=100.0, measured=90.0 + number) for number in range(10)]
    assert interval(ten[1:], 50.0) is None
    assert interval(ten, 50.0) == pytest.approx((45.0, 49.5))
    outliers = [replace(ONE, predicted=1.0, measured=measured) for measured in (0.1, 9.0)]
    twenty = ten + ten[1:9] + outliers
    assert interval(twenty, 50.0) == pytest.approx((45.0, 49.5))
