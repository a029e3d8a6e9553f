"""One step: loads are issued first, what is there is computed meanwhile, and each expert once it is
there."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.backends.backend import StepTokens
from runtime.control.plan import NO_SLOT, Place, Plan, Wave
from runtime.engine import step as module
from runtime.engine.step import StepExecutor
from runtime.links.link import DEMAND, PREFETCH
from runtime.links.link import Link as AnyLink

E = 4
H = 2
FIXED = "the places of experts that stay"


class Experts:
    """A backend that writes down what it is asked for."""

    computes_layers = False

    def __init__(self, events: list) -> None:
        self.events = events
        self.whole: dict[int, list[int]] = {}

    def begin(self, tokens: StepTokens) -> "Experts":
        self.tokens = tokens
        weights = tokens.planned_weights() if tokens.are_planned else tokens.router_weights
        self.events.append(("begin", tokens.experts.tolist(), weights.tolist()))
        return self

    def add(self, places: list[Place]) -> None:
        self.events.append(("add", *(place.key for place in places)))
        assert places
        self.places = [*getattr(self, "places", []), *places]

    def add_near(self, places: tuple[Place, ...], near: object, ready: list[Place]) -> None:
        self.events.append(
            ("near", *(place.key for place in places), "with", *(place.key for place in ready))
        )

    def finish(self) -> str:
        return "finished"

    def forward(
        self, module: object, hidden: object, experts: list[int], places: object, weights: object
    ) -> str:
        assert places == FIXED
        return f"forward of {experts}"

    def clear(self) -> None:
        self.events.append("backend cleared")


class OnDevice(Experts):
    """One that also computes a layer whose experts all stay, without the host."""

    computes_layers = needs_all = True

    def note_layer(self, layer: int, slots: list[int]) -> None:
        self.whole[layer] = slots
        self.events.append(("whole", layer, slots))

    def forward_whole(self, layer: int, hidden: object, ids: object, weights: object) -> str:
        return f"on the device, layer {layer}"


class Partial(OnDevice):
    """One that is told which experts of a layer are there, and computes what needs no other."""

    needs_all = False

    def forward_whole(self, layer: int, hidden: object, ids: object, weights: object) -> str | None:
        return None if layer == 0 else f"at once, layer {layer}"


class Link(AnyLink):
    """A link on which those have landed that are named in `landed`, and those that were
    collected."""

    def __init__(self, events: list) -> None:
        self.events = events
        self.landed = set()
        self.is_concurrent = False

    def issue(self, key: int, slot: object, *, urgency: int, bits: int) -> SimpleNamespace:
        self.events.append(("issue" if urgency == DEMAND else "prefetch", key))
        return SimpleNamespace(key=key, slot=slot, urgency=urgency, bits=bits)

    def has_landed(self, transfer: SimpleNamespace) -> bool:
        return transfer.key in self.landed

    def collect(self, transfer: SimpleNamespace) -> None:
        self.events.append(("collect", transfer.key))
        self.landed.add(transfer.key)

    def cancel(self, transfer: SimpleNamespace) -> None:
        self.events.append(("cancel", transfer.key))

    def clear(self) -> None:
        self.events.append("link cleared")

    def wait_for_copies(self) -> None:
        self.events.append("link waited for")


class Bench:
    """An executor whose surroundings are fakes; `events` has in order what it asked of them."""

    def __init__(self, patch: pytest.MonkeyPatch, **named: object) -> None:
        options = {
            "backend": Experts,
            "is_fused": False,
            "holds_all": False,
            "holds_low": False,
            "are_apart": False,
            "is_concurrent": False,
        }
        options |= {"is_queued": False}
        options |= {"shadows": None, "is_worth": False} | named
        self.events: list = []
        self.made: dict[str, object] = {}
        self.link = Link(self.events)
        self.link.is_concurrent = options["is_concurrent"]
        self.link.is_queued = options["is_queued"]
        self._kind: type[Experts] = options["backend"]
        patch.setattr(module, "open_backend", self._backend)
        patch.setattr(module, "is_worth_batching", lambda opened: options["is_worth"])
        patch.setattr(module, "ResidentExperts", self._resident)
        self.plan: Plan = plan()
        self.fixed: object = None
        places = [Place(key, 10 + key) for key in range(2 * E)]
        self.controller = SimpleNamespace(
            holds_all=options["holds_all"],
            holds_low=options["holds_low"],
            step=self._planned,
            fixed_places=lambda layer, experts: self.fixed,
            counts_chosen=options["holds_low"],
            reads_shadows=True,
            count_fixed=lambda layer, num_layers, chosen: self.events.append(("fixed", layer)),
            shape=SimpleNamespace(num_experts=E),
            cache=SimpleNamespace(
                places=places, shadows=np.arange(2 * E) % 4 + 1, is_whole=lambda layer: layer == 1
            ),
        )
        self.watcher = SimpleNamespace(rows=None, on_step=None, decodes=True, step=self._step)
        tiers = SimpleNamespace(
            link=self.link,
            near=SimpleNamespace(
                begin=lambda near: self.events.append("near begins"),
                finish=lambda: self.events.append("near ends"),
            ),
            slow=SimpleNamespace(together=lambda opened: "batched"),
        )
        arena = SimpleNamespace(device=torch.device("cpu"))
        slots = SimpleNamespace(are_apart=options["are_apart"], arenas=[arena])
        self.steps = StepExecutor(
            SimpleNamespace(sum_dtype=torch.float32),
            self.controller,
            self.watcher,
            tiers=tiers,
            slots=slots,
            shadows=options["shadows"],
            threads=None,
            is_fused=options["is_fused"],
        )

    def run(self, num_tokens: int = 1, layer: int = 0) -> object:
        self.events.clear()
        ids = torch.arange(num_tokens * 2).view(num_tokens, 2) % E
        hidden = torch.zeros(num_tokens, H)
        weights = torch.full((num_tokens, 2), 0.5)
        return self.steps.run(SimpleNamespace(index=layer, experts=None), hidden, ids, weights)

    def work(self, num_tokens: int = 2) -> list:
        """The events of a step without the one that begins it."""
        self.run(num_tokens)
        assert self.events[0][0] == "begin"
        return self.events[1:]

    def coming(self, *places: Place, landed: bool = False) -> None:
        """Have prefetches under way."""
        self.steps.issue(places, PREFETCH)
        if landed:
            self.link.landed |= {place.key for place in places}

    def _resident(
        self, opened: object, slots: object, slow: object, shadows: object, *, is_fused: bool
    ) -> SimpleNamespace:
        return SimpleNamespace(slots=slots, room=lambda place: ("room", place.slot))

    def _backend(
        self, opened: object, resident: object, threads: object, *, batched: object, is_fused: bool
    ) -> Experts:
        self.made |= {"batched": batched, "is_fused": is_fused}
        return self._kind(self.events)

    def _planned(self, step: SimpleNamespace) -> Plan:
        """The plan, which keeps the router's choice where it names no other."""
        if self.plan.selected is None:
            self.plan.selected = step.selected
        return self.plan

    def _step(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(layer=layer, selected=ids.numpy(), weights=weights.numpy())


def plan(
    *waves: Wave, near: tuple = (), low: tuple = (), prefetches: tuple = (), **own: object
) -> Plan:
    selected = own.get("selected", np.array([[1, 0], [2, -1]]))
    return Plan(0, selected, own.get("weights"), waves, near, low, prefetches)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    return lambda **named: Bench(monkeypatch, **named)


A, B, C, D, F, G = (Place(key, slot) for key, slot in enumerate((0, 1, 0, 1, 0, 5)))


@pytest.mark.parametrize(
    ("named", "batched"),
    [({}, "batched"), ({"are_apart": True}, None), ({"is_fused": True}, None)],
)
def test_experts_are_batched_where_torch_computes_them_on_one_device(
    bench: Callable[..., Bench], named: dict, batched: object
) -> None:
    made = bench(**named)
    assert made.made == {"batched": batched, "is_fused": "is_fused" in named}
    assert made.steps.num_not_landed == 0


def test_a_step_without_loads_brings_ahead_and_computes_on_replicas_and_near(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.plan = plan(low=(A, B), near=(C,), prefetches=(G,))
    assert made.work() == [
        "near begins",
        *(("prefetch", 5), ("add", 0, 1), ("near", 2, "with")),
        "near ends",
    ]
    made.plan = plan()
    assert made.work() == []


def test_loads_come_first_then_what_is_low_and_what_is_there_and_prefetches_last(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.plan = plan(Wave((A,), (B,)), low=(D,), prefetches=(G,))
    assert made.work() == [
        ("issue", 1),
        ("add", 3),
        ("prefetch", 5),
        ("add", 0),
        ("collect", 1),
        ("add", 1),
    ]
    assert list(made.steps.pending) == [5]
    assert (made.steps.pending[5].slot, made.steps.pending[5].bits) == (("room", 5), 16)


def test_what_has_landed_is_computed_with_what_was_there(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.coming(B, landed=True)
    made.plan = plan(Wave((A, B), ()))
    assert made.work() == [("collect", 1), ("add", 0, 1)] and not made.steps.pending
    made.plan = plan(Wave((), (A,)))
    made.link.landed.clear()
    assert made.work() == [("issue", 0), ("collect", 0), ("add", 0)]


def test_a_load_of_the_next_wave_is_issued_when_its_slot_is_free(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.plan = plan(Wave((A,), (B,)), Wave((), (C, D)), Wave((), (F,)), prefetches=(G,))
    assert made.work() == [
        ("issue", 1),
        *(("add", 0), ("issue", 2), ("collect", 1), ("add", 1), ("issue", 3)),
        *(("collect", 2), ("add", 2), ("issue", 4), ("collect", 3), ("add", 3)),
        *(("prefetch", 5), ("collect", 4), ("add", 4)),
    ]


def test_a_load_into_a_slot_that_no_expert_of_the_wave_uses_is_issued_after_the_wave(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.plan = plan(Wave((A,), ()), Wave((D,), (G, C)))
    issued = [("add", 0), ("issue", 2), ("issue", 5)]
    assert made.work() == [
        *issued,
        ("add", 3),
        ("collect", 5),
        ("add", 5),
        ("collect", 2),
        ("add", 2),
    ]


@pytest.mark.parametrize("later", [(), (Wave((), (C,)),)], ids=["one wave", "two waves"])
def test_near_experts_are_computed_in_the_first_wave_while_loads_are_under_way(
    bench: Callable[..., Bench], later: tuple[Wave, ...]
) -> None:
    """Together with what is there, unless a load waits for one of its slots."""
    made = bench()
    made.plan = plan(Wave((A,), (B,)), *later, near=(D,))
    near = (
        [("near", 3, "with", 0)] if not later else [("add", 0), ("issue", 2), ("near", 3, "with")]
    )
    rest = [("collect", 2), ("add", 2)] if later else []
    work = ["near begins", ("issue", 1), *near, ("collect", 1), ("add", 1), *rest, "near ends"]
    assert made.work() == work


@pytest.mark.parametrize(
    ("named", "num_tokens", "waits"),
    [
        ({"is_concurrent": True, "is_worth": True}, 1, True),
        ({"is_concurrent": True, "is_worth": True}, 2, False),
        ({"is_concurrent": True}, 1, False),
        ({"is_worth": True}, 1, False),
    ],
)
def test_one_tokens_experts_are_one_call_where_reads_land_together(
    bench: Callable[..., Bench], named: dict, num_tokens: int, waits: bool
) -> None:
    made = bench(**named)
    made.plan = plan(Wave((G,), (A, B)))
    first = [("issue", 0), ("issue", 1)]
    if waits:
        assert made.work(num_tokens) == [
            *first,
            *(("collect", key) for key in (1, 0, 0, 1)),
            ("add", 5, 0, 1),
        ]
    else:
        assert made.work(num_tokens) == [
            *first,
            ("add", 5),
            ("collect", 0),
            ("add", 0),
            ("collect", 1),
            ("add", 1),
        ]


@pytest.mark.parametrize("shadows", [None, "replicas"])
def test_one_tokens_experts_are_two_calls_where_the_device_waits(
    bench: Callable[..., Bench], shadows: object
) -> None:
    """What is there is computed while the others come."""
    made = bench(is_queued=True, shadows=shadows)
    made.plan = plan(Wave((G,), (A, B)))
    arrivals = [("collect", 0), ("collect", 1)] * (shadows is None)
    assert made.work(1) == [("issue", 0), ("issue", 1), ("add", 5), *arrivals, ("add", 0, 1)]
    made.plan = plan(Wave((G,), ()))
    assert made.work(1) == [("add", 5)]


def test_what_has_not_landed_is_computed_on_the_replica_that_stays(
    bench: Callable[..., Bench],
) -> None:
    """Also where reads land together: nothing is waited for."""
    made = bench(shadows="replicas", is_concurrent=True, is_worth=True)
    made.coming(A, B)
    made.link.landed = {0}
    made.plan = plan(Wave((A, B), ()))
    assert made.work(1) == [("collect", 0), ("add", 0), ("add", 1)]
    assert made.steps.num_not_landed == 1 and list(made.steps.pending) == [1]
    late = made.steps.backend.places[-1]
    assert (late.key, late.slot, late.bits) == (1, NO_SLOT, 2)


def test_a_transfer_that_is_on_its_way_into_a_slot_is_cancelled_before_the_next_one(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.coming(A)
    made.plan = plan(Wave((), (C,)))
    assert made.work() == [("cancel", 0), ("issue", 2), ("collect", 2), ("add", 2)]


def test_a_batch_begins_with_the_plans_experts_and_weights_and_rows_of_padding(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.run(2)
    assert made.events[0] == ("begin", [[1, 0], [2, -1]], [[0.5, 0.5], [0.5, 0.5]])
    made.plan = plan(weights=np.array([[0.25, 1.0], [2.0, 0.0]]))
    made.run(2)
    assert made.events[0] == ("begin", [[1, 0], [2, -1]], [[0.25, 1.0], [2.0, 0.0]])
    made.watcher.rows = np.array([1, 3])
    assert made.run(4) == "finished"
    padded = [[0.0, 0.0], [0.25, 1.0], [0.0, 0.0], [2.0, 0.0]]
    assert made.events[0] == ("begin", [[-1, -1], [1, 0], [-1, -1], [2, -1]], padded)


def test_a_step_tells_whether_experts_and_weights_are_the_routers_own(
    bench: Callable[..., Bench],
) -> None:
    """The host then need not send them to the device."""
    made = bench()
    for selected, weights in (
        (None, None),
        (None, np.array([[0.25, 0.0]])),
        (np.array([[3, -1]]), None),
    ):
        made.plan = plan(selected=selected, weights=weights)
        made.run(1)
        tokens = made.steps.backend.tokens
        assert tokens.are_routed == (selected is None and weights is None)
        assert tokens.ids.tolist() == [[0, 1]]
        expected = [[0.5, 0.5]] if weights is None else weights.tolist()
        assert tokens.host_weights.tolist() == expected


@pytest.mark.parametrize("named", [{"holds_all": True}, {"holds_low": True}])
def test_nothing_is_planned_for_a_token_whose_experts_all_stay(
    bench: Callable[..., Bench], named: dict
) -> None:
    made = bench(**named)
    made.plan = plan(selected=np.array([[0, 1]]))
    assert made.run() == "finished", "these experts are not there yet"
    made.fixed = FIXED
    assert made.run() == "forward of [0, 1]" and made.events == []
    assert made.run(2) == "finished"
    made.watcher.on_step = print
    assert made.run() == "finished", "an observer is to see the step"


@pytest.mark.parametrize("named", [{}, {"holds_all": True, "are_apart": True}])
def test_a_step_is_planned_where_experts_come_and_go_or_lie_apart(
    bench: Callable[..., Bench], named: dict
) -> None:
    made = bench(**named)
    made.fixed = FIXED
    assert made.run() == "finished"


def test_a_token_whose_experts_never_leave_is_computed_at_once_as_soon_as_they_are_there(
    bench: Callable[..., Bench],
) -> None:
    made = bench(backend=Partial, holds_all=True)
    made.plan = plan()
    for _ in range(2):  # noted anew each time, since an expert may have come
        assert made.run(layer=0) == "finished"
        assert made.events[0] == ("whole", 0, [10, 11, 12, 13]) and ("fixed", 0) not in made.events
    made.controller.cache.places[5] = None
    assert made.run(layer=1) == "at once, layer 1"
    assert made.events == [("whole", 1, [14, NO_SLOT, 16, 17]), ("fixed", 1)]
    assert made.run(layer=1) == "at once, layer 1" and made.events == [("fixed", 1)]


def test_a_layer_that_stays_as_a_whole_never_leaves_the_device(bench: Callable[..., Bench]) -> None:
    made = bench(backend=OnDevice, holds_all=True)
    made.plan = plan(selected=np.array([[0, 1]]))
    assert made.run(layer=0) == "finished", "this layer is not whole"
    assert made.run(layer=1) == "on the device, layer 1"
    assert made.events == [("whole", 1, [14, 15, 16, 17]), ("fixed", 1)]
    assert made.run(layer=1) == "on the device, layer 1" and made.events == [("fixed", 1)]
    assert made.run(2, layer=1) == "finished"
    made.coming(G)
    assert made.run(layer=1) == "finished", "a transfer is under way"
    other = bench(backend=OnDevice)
    assert other.run(layer=1) == "finished", "experts may leave"


def test_slots_are_released_when_no_copy_is_under_way_and_laid_out_again(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.coming(A)
    slots = made.steps.resident.slots
    made.events.clear()
    made.steps.release_slots()
    assert made.events == ["link cleared", "link waited for"] and not made.steps.pending
    assert not hasattr(made.steps, "resident") and not hasattr(made.steps, "backend")
    made.steps.lay_out(slots)
    made.coming(A)
    made.events.clear()
    made.steps.clear()
    assert made.events == ["link cleared", "backend cleared"] and not made.steps.pending
