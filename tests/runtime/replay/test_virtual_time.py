"""Virtual time on examples worked by hand. An expert computes for 2 s, loads for 5 s and takes 3 s
in the near tier; a layer takes 1 s before its experts, a pass half a second after its layers."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from artifacts.hardware.costs import Costs, Work, rounded_ratio, rounded_window
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS
from runtime.control.plan import NO_SLOT, Place, Plan, Wave
from runtime.control.splits.split_solver import latencies_of
from runtime.replay.virtual_time import ReplayTiming

COSTS = Costs(
    expert=Work(2, 1), load_s=5, load_latency_s=0, near=Work(3), rest=Work(1), head=Work(0.5)
)
NUM_EXPERTS = 8
NBYTES = {16: 1600, 4: 400, 2: 200}


def places(*slots: int, bits: int = 16) -> tuple[Place, ...]:
    """Return places: expert i is in slot i."""
    return tuple(Place(slot, slot, bits) for slot in slots)


def elsewhere(*experts: int, bits: int = 16) -> tuple[Place, ...]:
    """Return places without a slot: near, or on resident replicas."""
    return tuple(Place(expert, NO_SLOT, bits) for expert in experts)


def plan(
    *waves: Wave,
    near: tuple[Place, ...] = (),
    low: tuple[Place, ...] = (),
    prefetches: tuple[Place, ...] = (),
    placed: tuple[Place, ...] = (),
    tokens: int = 1,
    is_ahead: bool = False,
) -> Plan:
    return Plan(
        0, np.zeros((tokens, 2), np.int64), None, waves, near, low, prefetches, is_ahead, placed
    )


def taken(*plans: Plan, costs: Costs = COSTS) -> tuple[float, float]:
    """Return the seconds of one pass without its head, and the stall in it."""
    timing = ReplayTiming(costs, NUM_EXPERTS, NBYTES)
    timing.begin_pass(1, num_decoded=1)
    for step in plans:
        timing.step(step)
    timing.end_pass()
    return timing.passes[0].seconds - 0.5, timing.passes[0].stall_s


def test_residents_are_computed_while_a_load_is_under_way() -> None:
    """Loaded from 1 to 6, the resident computed from 1 to 3; 3 s of waiting."""
    assert taken(plan(Wave(places(0), places(1)))) == (8, 3)


def test_loads_come_one_after_another() -> None:
    """They arrive at 6 and 11."""
    assert taken(plan(Wave((), places(0, 1)))) == (13, 5 + 3)


def test_a_segment_loads_and_computes_its_share() -> None:
    """The top, 0.4 of the expert, computes from 1 to 1.8; the bottom arrives at 1 + 3 and takes 1.2
    s."""
    top = Place(0, 0, share=0.4)
    bottom = Place(0 + NUM_EXPERTS, 1, share=0.6)
    seconds, stall_s = taken(plan(Wave((top,), (bottom,))))
    assert seconds == pytest.approx(1 + 3 + 1.2) and stall_s == pytest.approx(4 - 1.8)


def test_a_demand_load_waits_for_the_prefetch_in_flight() -> None:
    """The prefetch arrives at 6 and is computed until 8, the load arrives at 11."""
    first = plan(Wave(places(0), ()), prefetches=places(5))
    assert taken(first, plan(Wave(places(5), places(2)))) == (13, 2 + 3)


def test_a_prefetch_that_is_sent_ahead_of_demand_delays_it() -> None:
    """The load is asked for at 3, when the resident is computed; the prefetch has the link from 1
    to 6, or after it."""
    waves = Wave(places(0), ()), Wave((), places(2))
    assert taken(plan(*waves, prefetches=places(5))) == (10, 5)
    assert taken(plan(*waves, prefetches=places(5), is_ahead=True)) == (13, 8)


def test_a_demand_load_overtakes_queued_prefetches() -> None:
    """5 arrives at 6, the load of 2 at 11; only then 6 starts, and it arrives at 16, 2 s after its
    layer began."""
    first = plan(Wave(places(0), ()), prefetches=places(5, 6))
    assert taken(first, plan(Wave((), places(2)))) == (13, 7)
    assert taken(first, plan(Wave((), places(2))), plan(Wave(places(6), ()))) == (18, 7 + 2)


def test_a_prefetch_that_is_waited_for_overtakes_the_others() -> None:
    """5 is in flight until 6; then 7 starts, not 6."""
    first = plan(Wave(places(0), ()), prefetches=places(5, 6, 7))
    assert taken(first, plan(Wave(places(7), ()))) == (13, 7)


def test_a_prefetch_that_has_landed_costs_nothing() -> None:
    first = plan(Wave(places(0, 1, 2, 3), ()), prefetches=places(5))
    assert taken(first, plan(Wave(places(5), ()))) == (9 + 3, 0)


def test_a_slot_taken_over_takes_its_prefetch_off_the_queue() -> None:
    """6 is no longer wanted, so that the load into its slot arrives at 11 and not at 16."""
    first = plan(Wave(places(0), ()), prefetches=places(5, 6))
    second = plan(Wave((), (Place(7, 6),)))
    assert taken(first, second) == (13, 7)
    assert taken(first, second, plan(Wave((Place(7, 6),), ()))) == (16, 7)


def test_what_is_placed_at_once_is_waited_for_where_it_is_used() -> None:
    """5 and 6 are sent for at 1; 6, which alone is used, goes first and arrives at 6. In a later
    wave, too."""
    assert taken(plan(Wave(places(6), ()), placed=places(6, 5))) == (8, 5)
    assert taken(plan(near=elsewhere(1), placed=places(5, 6))) == (4, 0)
    waves = (Wave(places(5), ()), Wave((), places(2)))
    assert taken(plan(*waves, placed=places(5))) == (15, 5 + 5), (
        "5 is computed at 8, and the next load sets out"
    )


def test_near_experts_are_computed_at_the_same_time() -> None:
    """Two of them take from 1 to 7; compute does not wait for the link."""
    assert taken(plan(Wave(places(0), ()), near=elsewhere(1, 2))) == (7, 0)
    assert taken(plan(near=elsewhere(1))) == (4, 0)
    assert taken(plan(Wave(places(0, 1, 2, 3), ()), near=elsewhere(4))) == (9, 0)


def test_near_experts_take_longer_while_the_link_reads_the_same_memory() -> None:
    """A load from 1 to 6 beside near experts of 3 s each, which lose half of their rate until
    then: two have done 2.5 of their 6 s at 6, and end at 9.5; one has done its 3 s at 7, as the
    prefetch behind goes on."""
    shared = replace(COSTS, contention=0.5)
    two = plan(Wave((), places(0)), near=elsewhere(1, 2))
    assert taken(two, costs=shared) == (9.5, 5) and taken(two) == (8, 5)
    behind = plan(near=elsewhere(1), prefetches=places(0))
    assert taken(behind, costs=shared) == (1 + 5.5, 0) and taken(behind) == (4, 0)
    assert taken(plan(near=elsewhere(1)), costs=shared) == (4, 0), "the link is idle"


def test_near_experts_of_the_computing_thread_are_computed_during_a_load() -> None:
    """The resident is computed until 3, the near one until 6, when the load has arrived; two tokens
    take twice the arithmetic."""
    costs = replace(COSTS, near=Work(0), near_host=Work(3, 2))
    assert taken(plan(Wave(places(0), places(1)), near=elsewhere(2)), costs=costs) == (8, 0)
    assert taken(plan(near=elsewhere(2)), costs=costs) == (1 + 3, 0)
    assert taken(plan(near=elsewhere(2, bits=4)), costs=costs) == (1 + 2, 0)
    timing = ReplayTiming(costs, NUM_EXPERTS, NBYTES)
    timing.begin_pass(1, num_decoded=1)
    timing.step(plan(Wave(places(0), places(1)), near=elsewhere(2)))
    timing.end_pass()
    assert timing.summary()["near_ms"] == 3000


def test_near_time_is_counted_by_itself() -> None:
    """Two near experts in one decode step and none in the other, whatever is computed at the same
    time."""
    timing = ReplayTiming(COSTS, NUM_EXPERTS, NBYTES)
    for decoded, near in ((0, (1, 2, 3)), (1, (1, 2)), (1, ())):
        timing.begin_pass(1, num_decoded=decoded)
        timing.step(plan(Wave(places(0), ()), near=elsewhere(*near)))
    timing.end_pass()
    assert timing.summary()["near_ms"] == pytest.approx((6000 + 0) / 2)


def test_near_memory_may_be_slower_in_arithmetic_than_in_reading() -> None:
    """On the NDP device of Table 2 four tokens are computed as long as an expert is read. Few bits
    save it arithmetic as well as bytes, as section 2.3 of the context-aware paper says; a host's
    arithmetic stays as it is."""
    model = MODELS["mixtral-8x7b"]
    near = Costs.of(model, machine("h100-cxl-ndp")).near
    assert near.seconds(1) == near.seconds(4) == pytest.approx(352.3e6 / 512e9, rel=1e-3)
    assert near.seconds(8) == pytest.approx(2 * near.seconds(1))
    assert (
        near.seconds(8, share=1 / 8)
        == near.scaled(1 / 8).seconds(8)
        == pytest.approx(near.seconds(8) / 8)
    )
    host = Costs.of(model, machine("a100-pcie4")).near
    assert host.seconds(1, share=1 / 8) == host.seconds(1) / 8
    assert (
        host.seconds(99, share=1 / 8)
        == host.seconds(99)
        == pytest.approx(99 * 352.3e6 / 2e12, rel=1e-3)
    )


def test_a_load_of_the_next_wave_sets_out_when_its_slot_is_free() -> None:
    """The resident is computed at 3, the first load arrives at 6, and the second, into the
    resident's slot, at 11; into the slot of the first load it starts at 8."""
    first = Wave(places(0), places(1))
    assert taken(plan(first, Wave((), (Place(2, 0),)))) == (13, 3 + 3)
    assert taken(plan(first, Wave((), (Place(2, 1),)))) == (15, 3 + 5)
    assert taken(plan(first, Wave((), (Place(2, 7),)))) == (15, 3 + 5), (
        "into a slot that none had, after the wave"
    )
    three = plan(first, Wave((), (Place(2, 0), Place(3, 1))), Wave((), (Place(4, 0),)))
    assert taken(three) == (23, 3 + 3 + 3 + 3)


def test_replicas_take_their_share_of_bytes() -> None:
    assert taken(plan(Wave((), places(0, bits=4)))) == (
        1 + 1.25 + 1,
        1.25,
    )  # a second of arithmetic remains
    assert taken(plan(near=elsewhere(0, 1, bits=4))) == (1 + 2 * 0.75, 0)


def test_replicas_that_stay_are_computed_while_a_load_is_under_way() -> None:
    """Expert 1 starts at 1, 0 is computed on its replica from 1 to 2; compute does not wait, and 1
    has arrived at 6."""
    first = plan(low=elsewhere(0, bits=4), prefetches=places(1))
    assert taken(first) == (2, 0)
    assert taken(first, plan(low=elsewhere(0, 2, 3, bits=4)), plan(Wave(places(1), ()))) == (9, 0)


def test_many_tokens_are_bound_by_arithmetic() -> None:
    """All tokens of `plan` want expert 0, twice each."""
    assert taken(plan(Wave(places(0, 1), ()), tokens=3)) == (1 + 6 + 2, 0)


def test_latency_comes_with_every_transfer() -> None:
    costs = Costs(
        COSTS.expert, load_s=5, load_latency_s=0.25, near=Work(3), rest=COSTS.rest, head=COSTS.head
    )
    assert taken(plan(Wave((), places(0, 1))), costs=costs) == (1 + 10.5 + 2, 5.25 + 3.25)


def test_a_disk_gives_a_segment_no_sooner_than_its_expert() -> None:
    """The bottom, 0.6 of the expert, arrives after all of 5 s."""
    top = Place(0, 0, share=0.4)
    bottom = Place(0 + NUM_EXPERTS, 1, share=0.6)
    seconds, _ = taken(plan(Wave((top,), (bottom,))), costs=replace(COSTS, reads_whole=True))
    assert seconds == pytest.approx(1 + 5 + 1.2)
    told = latencies_of(replace(COSTS, reads_whole=True, load_latency_s=0.5, host_s=0.25), 2)
    assert (told.load_s, told.latency_s, told.host_s, told.moe_s) == (0, 5.5, 0.25, 4)
    told = latencies_of(replace(COSTS, load_latency_s=0.5), 2)
    assert (told.load_s, told.latency_s) == (5, 0.5)


def test_the_engine_works_on_every_load_and_does_not_compute_meanwhile() -> None:
    """From 1 to 1.5 the engine works on expert 1, to 2 on the prefetch; 0 is computed until 4, and
    1 has arrived at 6.5."""
    costs = replace(COSTS, host_s=0.5)
    seconds, stall_s = taken(plan(Wave(places(0), places(1)), prefetches=places(5)), costs=costs)
    assert (seconds, stall_s) == (6.5 + 2, 2.5)


def test_compute_takes_what_a_link_leaves_to_it() -> None:
    """A demand load is copied from 1 to 1.5, arrives at 6, is waited for until 6.25 and takes 0.75
    more. A prefetch that has arrived only takes the copy."""
    costs = replace(COSTS, copy_s=0.5, demand_s=0.75, wake_s=0.25)
    assert taken(plan(Wave((), places(1))), costs=costs) == (7 + 2, 6.25 - 1.5)
    first = plan(Wave(places(0, 1, 2, 3), ()), prefetches=places(5))
    assert taken(first, plan(Wave(places(5), ())), costs=costs) == (9 + 3 + 0.5, 0)


def test_the_summary_tells_prefill_from_decode() -> None:
    timing = ReplayTiming(COSTS, NUM_EXPERTS, NBYTES)
    for tokens, decoded, resident in ((4, 0, 3), (2, 2, 1), (2, 2, 2)):
        timing.begin_pass(tokens, num_decoded=decoded)
        timing.step(plan(Wave(places(*range(1, 1 + resident)), ())))
    timing.end_pass()
    told = timing.summary()
    assert told["ttft_ms"] == 7500
    assert told["tpot_ms"] == pytest.approx((3500 + 5500) / 2)
    assert told["tokens_per_s"] == pytest.approx(4 / 9)
    assert told["exposed_ms"] == 0


def test_a_pass_with_a_prompt_and_answers_counts_what_it_decodes_and_a_head_for_each_request() -> (
    None
):
    """A layer with three experts takes 7 s, the head half a second for each request."""
    costs = replace(COSTS, head=Work(0, 0.5))
    timing = ReplayTiming(costs, NUM_EXPERTS, NBYTES)
    timing.begin_pass(10, num_decoded=2, num_heads=3)
    timing.step(plan(Wave(places(1, 2, 3), ())))
    timing.begin_pass(2, num_decoded=2, num_heads=2)
    timing.step(plan(Wave(places(1, 2, 3), ())))
    timing.end_pass()
    assert timing.ends_s().tolist() == [8.5, 16.5]
    told = timing.summary()
    assert (told["ttft_ms"], told["tpot_ms"], told["tokens_per_s"]) == (
        None,
        8250,
        pytest.approx(4 / 16.5),
    )


def test_what_a_trace_does_not_have_is_not_made_up() -> None:
    timing = ReplayTiming(COSTS, NUM_EXPERTS, NBYTES)
    timing.begin_pass(1, num_decoded=1)
    timing.step(plan(Wave(places(0), ())))
    timing.end_pass()
    assert timing.summary()["ttft_ms"] is None
    timing = ReplayTiming(COSTS, NUM_EXPERTS, NBYTES)
    timing.begin_pass(1, num_decoded=0)
    timing.end_pass()
    assert timing.summary()["tpot_ms"] is timing.summary()["near_ms"] is None


def test_costs_of_a_named_model_on_a_named_machine() -> None:
    """Mixtral on an A100: an expert of 352 MB is read in 0.18 ms and loaded in 14 ms."""
    model = MODELS["mixtral-8x7b"]
    costs = Costs.of(model, machine("a100-pcie4"))
    assert model.shape.expert_nbytes == 3 * 4096 * 14336 * 2
    assert costs.expert.seconds(1) == pytest.approx(352.3e6 / 1935e9, rel=1e-3)
    assert costs.load_s == pytest.approx(352.3e6 / 25e9, rel=1e-3)
    assert costs.expert.seconds(10_000) == pytest.approx(10_000 * 352.3e6 / 312e12, rel=1e-3)
    assert costs.rest.seconds(1) == pytest.approx(84e6 / 1935e9, rel=2e-3), (
        "eight heads of keys and values, not 32"
    )
    assert costs.window_nbytes(model.shape.expert_nbytes, 2) == model.shape.expert_nbytes // 32


def test_a_machine_s_own_seconds_replace_those_of_its_bandwidths() -> None:
    model = MODELS["mixtral-8x7b"]
    known = machine("a100-pcie4")
    plain = Costs.of(model, known)
    costs = Costs.of(model, replace(known, load_s=0.02, layer_s=0.003, head_s=0.004))
    assert (costs.load_s, costs.load_latency_s) == (0.02, 0.0)
    assert (costs.rest.seconds(1), costs.head.seconds(1)) == (0.003, 0.004)
    assert (costs.expert, costs.near) == (plain.expert, plain.near)


@pytest.mark.parametrize(
    ("experts", "nbytes"), [(1, 1000), (1.3, 1000), (1.5, 2000), (0.3, 250), (1e-9, 1)]
)
def test_windows_are_powers_of_two_of_experts(experts: float, nbytes: int) -> None:
    assert rounded_window(experts, 1000) == nbytes


@pytest.mark.parametrize(
    ("ratio", "rounded"),
    [(0.5, 0.5), (0.574, 0.595), (0.357, 0.354), (0.6, 0.595), (1.0, 1.0), (6.9, 6.73)],
)
def test_ratios_are_quarters_of_powers_of_two(ratio: float, rounded: float) -> None:
    assert rounded_ratio(ratio) == rounded == rounded_ratio(rounded)


def test_the_ratio_of_a_machine_is_that_of_its_loads_and_near_experts() -> None:
    model = MODELS["gpt-oss-20b"]
    assert Costs.of(model, machine("rtx4090")).link_over_near == 0.354
    on_cpu = replace(COSTS, near=Work(0), near_host=Work(10))
    assert (COSTS.link_over_near, on_cpu.link_over_near) == (0.595, 2.0)
    unmeasured = replace(COSTS, near=Work(0))
    absent = replace(unmeasured, near_host=Work(inf))
    assert (unmeasured.link_over_near, absent.link_over_near) == (0.000977, 1020.0)
    assert Costs.of(model, machine("rtx4090")).contention == pytest.approx(25 / 70)
    assert Costs.of(model, machine("rtx3090")).contention == 0, "its memory is not known"
