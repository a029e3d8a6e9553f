"""What torch computes of a step: each expert's share once, in the model's order, in as few calls as
there may be."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.backends.backend import StepTokens
from runtime.backends.torch_backend import TorchBackend
from runtime.control.plan import NO_SLOT, Place

E = 6
H = 3
FULL = 16
LOW = 2


def factor(place: Place) -> float:
    """What an expert, or a replica of it, multiplies its tokens by."""
    return (place.key % E + 2.3) * (1 if place.bits == FULL else 10) * place.share


class Experts:
    """The fast tier, batched products and packed kernels, which write down in `calls` what they
    compute."""

    def __init__(self, *, are_apart: bool = False) -> None:
        self.calls: list[tuple] = []
        self.held: dict[int, Place] = {}
        self.num_experts = E
        self.are_apart = are_apart
        self.slots = self

    def __getitem__(self, slot: int) -> SimpleNamespace:
        assert self.are_apart, "asked for a slot's device where all lie together"
        return SimpleNamespace(device=torch.device("cpu"))

    def place(
        self, key: int, *, slot: int | None = None, bits: int = FULL, share: float = 1.0
    ) -> Place:
        place = Place(key, len(self.held) if slot is None else slot, bits, share)
        self.held[place.slot] = place
        return place

    # Of the fast tier

    def forward(self, module: object, place: Place, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(("one", place.key))
        return x * factor(place)

    def weights(self, place: Place) -> Place:
        return place

    def whole(self, slot: int) -> Place:
        return self.held[slot]

    def together(self, places: Sequence[Place]) -> tuple[list[Place], list[int]]:
        return list(places), [place.slot for place in places]


class Batched:
    def __init__(self, experts: Experts) -> None:
        self._calls = experts.calls

    def forward(
        self,
        module: object,
        views: Sequence[Place],
        x: torch.Tensor,
        *,
        beside: list[int] | None = None,
    ) -> torch.Tensor:
        self._calls.append(("batch", *(place.key for place in views)))
        assert len(x) == 1 and len(views) > 0 and all(place.bits == FULL for place in views)
        assert beside is None or beside == sorted(place.slot for place in views)
        return torch.stack([x * factor(place) for place in views])


class Kernels:
    """Packed kernels of one token."""

    def __init__(self, experts: Experts) -> None:
        self._calls = experts.calls

    packed_bits = frozenset({LOW})

    def starts(self, places: Sequence[Place]) -> list[int]:
        return [place.slot for place in places]

    def takes(self, place: Place, num_tokens: int) -> bool:
        return num_tokens <= 2

    def forward(self, place: Place, start: int, x: torch.Tensor) -> torch.Tensor:
        self._calls.append(("few", start, len(x)))
        return x * factor(place)

    def outputs(
        self, hidden: torch.Tensor, places: Sequence[Place], starts: Sequence[int]
    ) -> torch.Tensor:
        self._calls.append(("packed", *starts))
        assert len(hidden) == 1 and all(place.bits == LOW for place in places)
        return torch.stack([hidden * factor(place) for place in places])


class Near:
    """The near tier; `is_in_ram` says whether its experts can be computed together with those of
    the fast tier."""

    def __init__(self, experts: Experts, *, is_in_ram: bool) -> None:
        self._calls = experts.calls
        self._is_in_ram = is_in_ram

    def views_in_ram(self, places: Sequence[Place]) -> list[Place] | None:
        return list(places) if self._is_in_ram else None

    def content(self, place: Place) -> SimpleNamespace:
        return SimpleNamespace(data_ptr=lambda: -100 - place.key)

    def forward(self, module: object, place: Place, x: torch.Tensor) -> torch.Tensor:
        self._calls.append(("near", place.key))
        return x * factor(place)


@pytest.fixture
def experts() -> Experts:
    return Experts()


def output_of(
    experts: Experts, *, batched: bool = True, kernels: bool = True, is_fused: bool = False
) -> TorchBackend:
    kinds = Batched(experts) if batched else None, Kernels(experts) if kernels else None
    return TorchBackend(experts, *kinds, sum_dtype=torch.float32, is_fused=is_fused)


def step(count: int, top_k: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    """Tokens [count, H], the experts 0 to top_k - 1 of each in another order, and weights [count,
    top_k]."""
    generator = torch.Generator().manual_seed(count)
    selected = np.stack([np.roll(np.arange(top_k), token + 1) for token in range(count)])
    return (
        torch.randn(count, H, generator=generator),
        selected,
        torch.rand(count, top_k, generator=generator) + 0.1,
    )


def tokens(
    hidden: torch.Tensor, selected: np.ndarray, weights: torch.Tensor, module: object = None
) -> StepTokens:
    """A step whose weights are the router's."""
    ids = torch.from_numpy(selected)
    return StepTokens(
        module,
        hidden,
        selected,
        ids,
        weights,
        weights.float().numpy(),
        are_planned=False,
        are_routed=False,
    )


def expected(
    hidden: torch.Tensor, selected: np.ndarray, weights: torch.Tensor, places: list[Place]
) -> torch.Tensor:
    """The sum over experts in ascending order, as the model's own code makes it."""
    out = torch.zeros_like(hidden)
    by_expert: dict[int, float] = {}
    for place in places:
        by_expert[place.key % E] = by_expert.get(place.key % E, 0.0) + factor(place)
    for expert in sorted(by_expert):
        for token, rank in zip(*np.nonzero(selected == expert), strict=True):
            out[token] += hidden[token] * by_expert[expert] * weights[token, rank]
    return out


def check(output: TorchBackend, places: list[Place], given: tuple) -> None:
    assert torch.allclose(output.finish(), expected(*given, places), rtol=1e-6)
    assert output._hidden is output._weights is output._module is None and not output._outputs, (
        "nothing stays"
    )


def test_several_tokens_are_computed_an_expert_at_a_time(experts: Experts) -> None:
    given = step(2, 4)
    output = output_of(experts)
    output.begin(tokens(*given))
    places = [
        experts.place(E + 2),
        experts.place(E + 3),
        experts.place(E, bits=LOW),
        experts.place(E + 1),
    ]
    output.add(places[:2])
    output.add(places[2:])
    in_turn = [("one", place.key) for place in places]
    assert experts.calls == in_turn, "kernels and batches take one token"
    check(output, places, given)


def test_fused_kernels_compute_an_expert_on_few_tokens_wherever_it_lies(experts: Experts) -> None:
    hidden, _, weights = step(3, 2)
    given = hidden, np.array([[0, 1], [1, 2], [1, 3]]), weights
    output = output_of(experts, batched=False, is_fused=True)
    output.begin(tokens(*given))
    there = [experts.place(E + 1), experts.place(E)]
    near = [Place(E + 2, NO_SLOT), Place(E + 3, NO_SLOT, LOW)]
    output.add_near(near, Near(experts, is_in_ram=True), there)
    assert experts.calls == [
        ("one", E + 1),
        ("few", 1, 1),
        ("few", -102 - E, 1),
        ("few", -103 - E, 1),
    ]
    check(output, [*there, *near], given)


@pytest.mark.parametrize("count", [2, 3])
def test_fused_kernels_take_near_experts_on_as_many_tokens_as_they_compute_sooner(
    experts: Experts, count: int
) -> None:
    given = step(count, 1)
    output = output_of(experts, is_fused=True)
    output.begin(tokens(*given))
    output.add_near([Place(0, NO_SLOT)], Near(experts, is_in_ram=True), [])
    assert experts.calls == [("few", -100, 2) if count == 2 else ("near", 0)]
    check(output, [Place(0, NO_SLOT)], given)


@pytest.mark.parametrize("count", [2, 3])
def test_one_tokens_experts_are_one_batch_in_the_order_of_their_slots(
    experts: Experts, count: int
) -> None:
    given = step(1, count)
    output = output_of(experts)
    output.begin(tokens(*given))
    places = [experts.place(E + expert, slot=9 - expert) for expert in range(count)]
    output.add(places)
    assert experts.calls == [("batch", *(E + expert for expert in reversed(range(count))))]
    check(output, places, given)


def test_one_expert_alone_is_no_batch(experts: Experts) -> None:
    given = step(1, 1)
    output = output_of(experts)
    output.begin(tokens(*given))
    output.add([experts.place(0)])
    assert experts.calls == [("one", 0)]
    check(output, [experts.place(0, slot=0)], given)


@pytest.mark.parametrize("batched", [True, False])
def test_packed_replicas_go_to_their_kernels_and_the_others_to_a_batch(
    experts: Experts, batched: bool
) -> None:
    given = step(1, 4)
    output = output_of(experts, batched=batched)
    output.begin(tokens(*given))
    places = [experts.place(E + expert, bits=LOW if expert % 2 else FULL) for expert in range(4)]
    output.add(places)
    others = [("batch", E, E + 2)] if batched else [("one", E), ("one", E + 2)]
    assert experts.calls == [("packed", 1, 3), *others]
    check(output, places, given)


def test_replicas_without_kernels_are_computed_one_by_one(experts: Experts) -> None:
    given = step(1, 3)
    output = output_of(experts, kernels=False)
    output.begin(tokens(*given))
    places = [experts.place(expert, bits=4 if expert == 1 else FULL) for expert in range(3)]
    output.add(places)
    assert experts.calls == [("one", 0), ("one", 1), ("one", 2)]
    check(output, places, given)


def test_segments_add_up_to_their_expert(experts: Experts) -> None:
    given = step(2, 1)
    output = output_of(experts)
    output.begin(tokens(*given))
    places = [experts.place(0, share=0.25), experts.place(0, share=0.75)]
    output.add(places)
    check(output, places, given)


@pytest.mark.parametrize("count", [1, 2])
def test_experts_on_devices_apart_are_computed_where_they_lie(count: int) -> None:
    experts = Experts(are_apart=True)
    given = step(count, 2)
    output = TorchBackend(experts, None, None, sum_dtype=torch.float32)
    output.begin(tokens(*given))
    places = [experts.place(E + 1), experts.place(E)]
    output.add(places)
    assert experts.calls == [("one", E + 1), ("one", E)]
    check(output, places, given)


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_near_experts_in_ram_join_the_batch_of_what_is_ready(experts: Experts, ready: int) -> None:
    given = step(1, 2 + ready)
    output = output_of(experts)
    output.begin(tokens(*given))
    there = [experts.place(E + 2 + number) for number in range(ready)]
    near = [Place(E, NO_SLOT), Place(E + 1, NO_SLOT)]
    output.add_near(near, Near(experts, is_in_ram=True), there)
    assert experts.calls == [("batch", E, E + 1, *(place.key for place in there))]
    check(output, [*near, *there], given)


@pytest.mark.parametrize(
    ("count", "batched", "in_ram", "ready_bits"),
    [
        (1, True, False, FULL),
        (1, False, True, FULL),
        (2, True, True, FULL),
        (1, True, True, LOW),
        (1, True, True, 4),
    ],
)
def test_near_experts_that_cannot_join_a_batch_are_computed_one_by_one(
    experts: Experts, count: int, batched: bool, in_ram: bool, ready_bits: int
) -> None:
    """On disk, without batches, for several tokens, or beside what is of fewer bits."""
    given = step(count, 3)
    output = output_of(experts, batched=batched)
    output.begin(tokens(*given))
    there = experts.place(E, bits=ready_bits)
    near = [Place(E + 1, NO_SLOT), Place(E + 2, NO_SLOT)]
    output.add_near(near, Near(experts, is_in_ram=in_ram), [there])
    first = ("packed", 0) if ready_bits == LOW else ("one", E)
    assert experts.calls == [first, ("near", E + 1), ("near", E + 2)]
    check(output, [*near, there], given)


def test_near_replicas_are_computed_by_kernels_where_they_lie(experts: Experts) -> None:
    given = step(1, 3)
    output = output_of(experts)
    output.begin(tokens(*given))
    near = [Place(E, NO_SLOT, LOW), Place(E + 1, NO_SLOT), Place(E + 2, NO_SLOT, LOW)]
    output.add_near(near, Near(experts, is_in_ram=True), [])
    assert experts.calls == [("packed", -100 - E), ("near", E + 1), ("packed", -102 - E)]
    check(output, near, given)


@pytest.mark.parametrize(
    ("bits", "batched", "kernels", "calls"),
    [
        (FULL, True, True, [("batch", E + 2, E, E + 1)]),
        (FULL, True, False, [("batch", E + 2, E, E + 1)]),
        (FULL, False, False, [("one", E + 2), ("one", E), ("one", E + 1)]),
        (LOW, True, True, [("packed", 0, 1, 2)]),
        (LOW, True, False, [("one", E + 2), ("one", E), ("one", E + 1)]),
        (4, True, True, [("one", E + 2), ("one", E), ("one", E + 1)]),
    ],
)
def test_a_whole_step_of_one_token(
    experts: Experts, bits: int, batched: bool, kernels: bool, calls: list[tuple]
) -> None:
    hidden, selected, weights = step(1, 3)
    assert selected.tolist() == [[2, 0, 1]]
    places = [experts.place(E + expert, bits=bits) for expert in selected[0].tolist()]
    out = output_of(experts, batched=batched, kernels=kernels).forward(
        None, hidden, selected[0].tolist(), places, weights.double()
    )
    assert experts.calls == calls
    assert out.shape == (1, H) and out.dtype == hidden.dtype
    assert torch.allclose(out, expected(hidden, selected, weights, places), rtol=1e-6)


def test_a_whole_step_of_a_single_expert(experts: Experts) -> None:
    hidden, selected, weights = step(1, 1)
    places = [experts.place(E)]
    out = output_of(experts).forward(None, hidden, [0], places, weights)
    assert torch.allclose(out, expected(hidden, selected, weights, places)) and out.shape == (1, H)
