"""A budget or a size of nothing, of less than an expert, of more than the model, or that is no
number.

Valid and invalid budgets: tests/runtime/control/test_sizes.py. As a user meets them:
tests/moectl/commands/test_bad_input.py.
"""

import pytest

from artifacts.errors import BadUsage, Problem
from artifacts.hardware.machines import MACHINES
from artifacts.modelshapes.known import unsized
from artifacts.shape import Shape
from artifacts.traces.synthetic import parse_dials
from runtime.control import sizes
from runtime.policies import parse
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from tests.helpers import artefacts

SHAPE = Shape(num_layers=8, num_experts=32, top_k=4, expert_nbytes=1 << 20)


@pytest.mark.parametrize(
    ("text", "slots", "nbytes"),
    [
        ("1x", 1, 1 << 20),
        ("1048576", 1, 1 << 20),
        ("1.999x", 1, int(1.999 * 2**20)),
        ("255.5x", 255, 255 * 2**20 + 2**19),
        ("256x", 256, 256 << 20),
        ("257x", 256, 256 << 20),
        ("1e300x", 256, 256 << 20),
        ("1e308TiB", 256, 256 << 20),
        ("1e308%", 256, 256 << 20),
        ("4GB", 256, 256 << 20),
        ("200MB", 190, 200_000_000),
        ("200MiB", 200, 200 << 20),
    ],
)
def test_at_the_borders(text: str, slots: int, nbytes: int) -> None:
    assert sizes.num_slots(text, SHAPE, per_layer=False) == slots
    assert sizes.budget_nbytes(text, SHAPE) == nbytes


@pytest.mark.parametrize("text", ["1048575", "0.999x", "0.39%", "1e-400GiB", "0TiB"])
def test_less_than_an_expert(text: str) -> None:
    with pytest.raises(BadUsage, match="one expert is the least: give at least 1x"):
        sizes.num_slots(text, SHAPE, per_layer=False)


@pytest.mark.parametrize(
    "text", ["1e308TiB", "1e309", "-1", "nan", "inf", "1_000", "0x10", "٣GiB", ""]
)
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(BadUsage, match="is not understood"):
        sizes.nbytes(text)


@pytest.mark.parametrize(
    "text", ["1e308TB/s", "1e-320B/s", "5GB/s+1e308s", "5GB/s+-1us", "inf", "5GB/s+"]
)
def test_rates_that_are_none(text: str) -> None:
    if text == "5GB/s+":
        assert sizes.rate(text) == (5e9, 0.0)
        return
    with pytest.raises(BadUsage, match="is not understood"):
        sizes.rate(text)


@pytest.mark.parametrize(
    "text", ["activation:overfetch=1e308", "next_gate:distance=9223372036854775808"]
)
def test_numbers_of_policies_that_would_overflow(text: str) -> None:
    with pytest.raises(BadUsage, match="takes a value of type"):
        parse("prefetch", text)


@pytest.mark.parametrize("name", ["next_gate", "frequency", "activation"])
def test_all_experts_may_come_ahead(name: str) -> None:
    parse("prefetch", f"{name}:overfetch=inf").prepare(Shape(2, 8, 2, 1), Artefacts())


@pytest.mark.parametrize(
    "text", ["tokens=4294967296", "batch=2305843009213693952", "requests=100000001", "prompt=1e9"]
)
def test_synthetic_traces_without_end(text: str) -> None:
    with pytest.raises(BadUsage, match="synthetic:"):
        parse_dials(text)


def test_every_budget_of_a_small_model_runs_or_is_refused() -> None:
    trace = artefacts.trace(12)
    shape = unsized(trace.num_layers, artefacts.SHAPE.num_experts, trace.top_k)
    workload = Workload(trace, shape, next(iter(MACHINES.values())))
    ran = []
    for slots in range(artefacts.SHAPE.num_keys + 2):
        try:
            outcome = workload.run(Setting("case", budget=f"{slots}x"))
        except Problem:
            continue
        ran.append(slots)
        counters = outcome.counters
        assert counters["hits"] + counters["misses"] + counters["late"] == counters["requests"]
    assert ran == [*range(artefacts.SHAPE.num_layers, artefacts.SHAPE.num_keys + 2)]


@pytest.mark.parametrize("share", ["25%", "50%"])
def test_replicas_that_fill_the_budget_leave_no_miss_without_a_slot(share: str) -> None:
    trace = artefacts.trace(12)
    shape = unsized(trace.num_layers, artefacts.SHAPE.num_experts, trace.top_k)
    workload = Workload(trace, shape, next(iter(MACHINES.values())))
    with pytest.raises(
        BadUsage, match="leaves no slot to what --miss fetch loads: give --miss shadow too"
    ):
        workload.run(Setting("case", policies={"residency": "shadow"}, budget=share))
