"""A batch of one token's experts gives the bits of one expert after another, or is not used."""

import pytest
import torch

from moectl.bundled import demo_model
from runtime.kernels import batched
from runtime.kernels.batched import BatchedExperts, choose_batched
from runtime.model.arithmetic import expert_forward
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY

OWN_GATE = {"gpt_oss"}
CASES = [
    (family, dtype)
    for family in FAMILIES
    if family not in OWN_GATE
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(params=CASES, ids="-".join)
def opened(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> MoeModel:
    family, dtype = request.param
    return open_model(str(checkpoint(family, "hub", dtype)))


def test_the_chosen_batch_gives_the_same_bits(opened: MoeModel) -> None:
    chosen = choose_batched(opened)
    layout = opened.store.layout
    assert chosen is not None
    random = torch.Generator().manual_seed(5)
    buffers = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(opened.shape.top_k)]
    for expert, buffer in enumerate(buffers):
        opened.store.read(0, expert, buffer)
    experts = [layout.views(buffer) for buffer in buffers]
    module = opened.layers[-1].experts
    for _ in range(5):
        x = torch.randn(1, opened.config.hidden_size, generator=random).to(layout.dtype)
        for num_experts in range(1, len(experts) + 1):
            some = experts[:num_experts]
            alone = torch.stack([expert_forward(module, views, x) for views in some])
            assert torch.equal(chosen.forward(module, some, x), alone)


def test_a_tier_of_one_tokens_slots_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots for exactly one token's experts lie as a batch needs them; the logits equal those of a
    full tier."""
    opened = open_model(str(demo_model()))
    copied = []
    stack = torch.stack

    def counted(parts: object, *given: object, **into: torch.Tensor) -> torch.Tensor:
        copied.extend(into)
        return stack(parts, *given, **into)

    monkeypatch.setattr(torch, "stack", counted)
    ids = torch.randint(3, opened.config.vocab_size, (1, 12), generator=torch.manual_seed(3))
    logits = {}
    for budget in ("100%", f"{opened.shape.top_k}x"):
        with Session(opened, Settings(budget=budget, scope="global", device="cpu")) as session:
            past = None
            steps = []
            copied.clear()  # opening the session tries batches out
            for token in ids.split(1, dim=1):
                out = session.forward(token, past=past)
                past = out.past_key_values
                steps.append(out.logits)
            logits[budget] = torch.cat(steps)
            assert bool(copied) == (budget == "100%")
    assert torch.equal(*logits.values())


@pytest.mark.parametrize("slots", [1, 2], ids=["all near", "some near"])
def test_near_and_resident_experts_are_one_batch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Each layer of a decoded token is one batch of all its experts."""
    opened = open_model(str(checkpoint("olmoe")))
    batches = []
    forward = BatchedExperts.forward

    def counted(
        self: BatchedExperts, module: object, experts: list, x: torch.Tensor, **options: object
    ) -> torch.Tensor:
        batches.append(len(experts))
        return forward(self, module, experts, x, **options)

    near = Settings(
        "near",
        budget=f"{slots * opened.shape.num_layers}x",
        link="1GB/s",
        near="1GB/s",
        device="cpu",
    )
    with Session(opened, near) as session:
        past = session.forward(torch.arange(8)[None]).past_key_values
        monkeypatch.setattr(BatchedExperts, "forward", counted)
        session.forward(torch.tensor([[9]]), past=past)
        last = session.controller.counters.by_layer(first_pass=-1)
    assert sum(layer["misses"] for layer in last) > 0
    assert batches == [opened.shape.top_k] * opened.shape.num_layers


def test_another_order_of_additions_is_detected(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is detected even in bfloat16, where rounding hides most differences in the last bits of a
    sum."""

    def backwards(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.float().mT * w.float()).flip(1).cumsum(dim=1)[:, -1:].to(x.dtype)

    opened = open_model(str(checkpoint("olmoe", "hub", "bfloat16")))
    assert choose_batched(opened)._batched
    monkeypatch.setattr(batched.torch, "bmm", backwards)
    assert not choose_batched(opened)._batched


def test_experts_larger_than_the_cache_are_not_batched(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(checkpoint("mixtral")))
    monkeypatch.setattr(batched, "IN_CACHE", opened.shape.top_k * opened.store.layout.nbytes - 1)
    assert choose_batched(opened) is None


@pytest.mark.parametrize("family", OWN_GATE)
def test_a_gate_of_several_kernels_is_not_shared(checkpoint: Checkpoint, family: str) -> None:
    assert choose_batched(open_model(str(checkpoint(family)))) is None


@pytest.mark.parametrize("size", [24, 32, 56, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_a_shared_gate_round_as_alone(
    checkpoint: Checkpoint, size: int, dtype: torch.dtype
) -> None:
    module = open_model(str(checkpoint("olmoe"))).layers[0].experts
    rows = torch.randn(500, 8, 1, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for batch in rows:
        alone = torch.stack([module._apply_gate(row) for row in batch])
        assert torch.equal(module._apply_gate(batch), alone)


def test_projections_that_are_not_batched_have_no_buffer(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("gpt_oss")))
    module = opened.layers[0].experts
    layout = opened.store.layout
    assert BatchedExperts(module, layout, 4, batched=())._into == [{}] * 5
    assert set(BatchedExperts(module, layout, 4, batched=["down_proj"])._into[2]) == {
        "down_proj",
        "down_proj_bias",
    }


def test_the_path_of_resident_layers_counts_and_computes_as_the_full_one(
    checkpoint: Checkpoint,
) -> None:
    """All experts are resident; a recorded run takes the full path at every step."""
    opened = open_model(str(checkpoint("qwen2_moe")))
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    logits = []
    counts = []
    for is_recorded in (True, False):
        with Session(opened, Settings(preset="full")) as session:
            if is_recorded:
                session.record()
            past = session.forward(ids[:, :8]).past_key_values
            steps = [session.forward(ids[:, i : i + 1], past=past).logits for i in range(8, 40)]
            logits.append(torch.cat(steps))
            counts.append([table.tolist() for table in session.controller.counters.passes])
            assert session.controller.now.step == 33 * opened.shape.num_layers - 1
    assert torch.equal(*logits)
    assert counts[0] == counts[1]
