"""With one expert in memory at a time a batch gives the model's own logits, and what is decided of
it is computed."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from runtime.engine.one_expert import ExpertBuffer, OneExpertRunner, Routed
from runtime.model.layout import aligned
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY

IDS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> Iterator[MoeModel]:
    opened = open_model(str(checkpoint("olmoe")))
    yield opened
    opened.store.close()


def test_a_batch_has_the_logits_of_a_session(opened: MoeModel) -> None:
    heard: list[Routed] = []

    def keep(routed: Routed) -> np.ndarray:
        heard.append(routed)
        return routed.selected

    with Session(opened, Settings("full")) as session:
        whole = session.forward(IDS).logits
        masked = session.forward(IDS, mask=MASK).logits
    kept: list[bool] = []
    handle = opened.model.register_forward_pre_hook(
        lambda model, args, kwargs: kept.append(kwargs["use_cache"]), with_kwargs=True
    )
    with OneExpertRunner(opened, keep) as runner:
        assert torch.equal(runner.forward(IDS), whole)
        assert torch.allclose(
            runner.forward(IDS, MASK)[MASK.bool()], masked[MASK.bool()], atol=1e-5
        )
        assert not torch.allclose(whole[0], masked[0], atol=1e-3)
    handle.remove()
    assert kept == [False, False], "keys and values would take memory"
    assert [routed.layer for routed in heard] == [0, 1, 0, 1]
    for routed in heard:
        assert routed.probabilities.shape == (IDS.numel(), opened.shape.num_experts)
        assert np.array_equal(routed.probabilities.topk(opened.shape.top_k)[1], routed.selected)
        with pytest.raises(FrozenInstanceError):
            routed.layer = 3


def test_ranks_that_are_left_out_are_not_computed(opened: MoeModel) -> None:
    with OneExpertRunner(opened, lambda routed: routed.selected) as runner:
        whole = runner.forward(IDS)
    with OneExpertRunner(opened, lambda routed: np.full_like(routed.selected, -1)) as runner:
        assert not torch.allclose(runner.forward(IDS), whole, atol=1e-3)


def test_the_model_is_given_back(opened: MoeModel) -> None:
    with OneExpertRunner(opened, lambda routed: routed.selected):
        assert all(len(layer.gate._forward_hooks) == 1 for layer in opened.layers)
    for layer in opened.layers:
        assert not layer.gate._forward_hooks and "moectl_forward" not in vars(layer.experts)
    assert opened.model.config._experts_implementation == "eager"
    with Session(opened, Settings()) as session:
        session.forward(IDS)


def test_the_next_read_overwrites_the_expert_and_nothing_is_copied_on_a_cpu(
    opened: MoeModel,
) -> None:
    buffer = ExpertBuffer(opened)
    content = aligned(opened.store.layout.nbytes)
    assert buffer._device is buffer._host
    for layer, expert in ((0, 1), (1, 0)):
        views = buffer.read(layer, expert)
        opened.store.read(layer, expert, content)
        for name, part in opened.store.layout.views(content).items():
            assert torch.equal(views[name], part)


def test_an_expert_is_copied_to_where_the_model_is(opened: MoeModel) -> None:
    buffer = ExpertBuffer(opened)
    content = aligned(opened.store.layout.nbytes)
    buffer._device = torch.zeros_like(buffer._host)
    buffer.read(1, 2)
    opened.store.read(1, 2, content)
    assert torch.equal(buffer._device, content)
