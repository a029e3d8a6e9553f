"""One token's experts together give the bits of one after another, or are not used."""

import pytest
import torch

from moectl.bundled import demo_model
from runtime.kernels import batched as together
from runtime.kernels.batched import BatchedExperts, choose_batched
from runtime.model.arithmetic import expert_forward
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY

OWN_GATE = {"gpt_oss"}
CASES = [(family, dtype) for family in FAMILIES if family not in OWN_GATE for dtype in ("float32", "bfloat16")]


@pytest.fixture(params=CASES, ids="-".join)
def opened(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> MoeModel:
    family, dtype = request.param
    return open_model(str(checkpoint(family, "hub", dtype)))


def test_what_is_chosen_gives_the_same_bits(opened: MoeModel) -> None:
    chosen, layout = choose_batched(opened), opened.store.layout
    assert chosen is not None
    random = torch.Generator().manual_seed(5)
    buffers = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(opened.shape.top_k)]
    for expert, buffer in enumerate(buffers):
        opened.store.read(0, expert, buffer)
    experts, module = [layout.views(buffer) for buffer in buffers], opened.layers[-1].experts
    for _ in range(5):
        x = torch.randn(1, opened.config.hidden_size, generator=random).to(layout.dtype)
        for num_experts in range(1, len(experts) + 1):
            some = experts[:num_experts]
            alone = torch.stack([expert_forward(module, views, x) for views in some])
            assert torch.equal(chosen.forward(module, some, x), alone)


def test_a_tier_for_one_token_copies_nothing_to_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots lie as a batch wants them; the logits are those of the tier that holds all."""
    opened, copied = open_model(str(demo_model())), []
    copy = BatchedExperts._copied
    monkeypatch.setattr(BatchedExperts, "_copied", lambda *given: copied.append(given) or copy(*given))
    ids = torch.randint(3, opened.config.vocab_size, (1, 12), generator=torch.manual_seed(3))
    logits = {}
    for budget in ("100%", f"{opened.shape.top_k}x"):
        with Session(opened, Settings(budget=budget, scope="global", device="cpu")) as session:
            past, found = None, []
            copied.clear()  # when it opens it tries out what gives the same bits
            for token in ids.split(1, dim=1):
                out = session.forward(token, past=past)
                past = out.past_key_values
                found.append(out.logits)
            logits[budget] = torch.cat(found)
            assert bool(copied) == (budget == "100%")
    assert torch.equal(*logits.values())


@pytest.mark.parametrize("slots", [1, 3], ids=["all near", "some near"])
def test_near_experts_are_computed_in_one_go_with_those_that_are_there(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Each layer of a decoded token is one batch of all its experts."""
    opened, batches = open_model(str(checkpoint("olmoe"))), []
    forward = BatchedExperts.forward

    def counted(self: BatchedExperts, module: object, experts: list, x: torch.Tensor, **known: object) -> torch.Tensor:
        batches.append(len(experts))
        return forward(self, module, experts, x, **known)

    near = Settings("near", budget=f"{slots * opened.shape.num_layers}x", link="1GB/s", near="1GB/s", device="cpu")
    with Session(opened, near) as session:
        past = session.forward(torch.arange(8)[None]).past_key_values
        monkeypatch.setattr(BatchedExperts, "forward", counted)
        session.forward(torch.tensor([[9]]), past=past)
        last = session.controller.counters.by_layer(first_pass=-1)
    assert sum(layer["misses"] for layer in last) > 0
    assert batches == [opened.shape.top_k] * opened.shape.num_layers


def test_another_order_of_additions_is_noticed(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in bfloat16, where the last bits of a sum hardly ever show in what it is rounded to."""

    def backwards(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.float().mT * w.float()).flip(1).cumsum(dim=1)[:, -1:].to(x.dtype)

    opened = open_model(str(checkpoint("olmoe", "hub", "bfloat16")))
    assert choose_batched(opened)._batched
    monkeypatch.setattr(together.torch, "bmm", backwards)
    assert not choose_batched(opened)._batched


def test_experts_that_would_leave_the_cache_are_left_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(checkpoint("mixtral")))
    monkeypatch.setattr(together, "IN_CACHE", opened.shape.top_k * opened.store.layout.nbytes - 1)
    assert choose_batched(opened) is None


@pytest.mark.parametrize("family", OWN_GATE)
def test_a_gate_of_several_kernels_is_not_shared(checkpoint: Checkpoint, family: str) -> None:
    assert choose_batched(open_model(str(checkpoint(family)))) is None


@pytest.mark.parametrize("size", [24, 32, 56, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_a_shared_gate_round_as_alone(checkpoint: Checkpoint, size: int, dtype: torch.dtype) -> None:
    module = open_model(str(checkpoint("olmoe"))).layers[0].experts
    rows = torch.randn(500, 8, 1, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for batch in rows:
        alone = torch.stack([module._apply_gate(row) for row in batch])
        assert torch.equal(module._apply_gate(batch), alone)


def test_nothing_is_held_for_what_is_not_batched(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("gpt_oss")))
    module, layout = opened.layers[0].experts, opened.store.layout
    assert BatchedExperts(module, layout, 4, batched=())._into == [{}] * 5
    assert set(BatchedExperts(module, layout, 4, batched=["down_proj"])._into[2]) == {"down_proj", "down_proj_bias"}


def test_the_short_way_counts_and_computes_as_the_long_one(checkpoint: Checkpoint) -> None:
    """Everything resident: a recorded run takes every step the long way."""
    opened = open_model(str(checkpoint("qwen2_moe")))
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    said, counted = [], []
    for is_recorded in (True, False):
        with Session(opened, Settings(preset="full")) as session:
            if is_recorded:
                session.record()
            past = session.forward(ids[:, :8]).past_key_values
            steps = [session.forward(ids[:, i : i + 1], past=past).logits for i in range(8, 40)]
            said.append(torch.cat(steps))
            counted.append([table.tolist() for table in session.controller.counters.passes])
            assert session.controller.now.step == 33 * opened.shape.num_layers - 1
    assert torch.equal(*said)
    assert counted[0] == counted[1]
