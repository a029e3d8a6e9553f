"""The watcher's steps carry what routers chose and predict, without padding."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from artifacts.traces.trace import DECODE, PREFILL
from runtime.engine.routers import Watcher
from runtime.model.layers import MoeLayer
from runtime.policies.step import Opening, Step

L = 3
E = 5
K = 2
H = 4


class Gate(nn.Module):
    """A router as transformers makes them: logits first, then what it chose."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = linear(x.flatten(0, -2), self.weight)
        return logits, *logits.softmax(-1).topk(K)


class Tiny:
    """An opened model of three routers, none of which reads what the one before it said."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(9, H)
        gates = [Gate(index) for index in range(L)]
        self.layers = [
            MoeLayer(index, f"{index}.experts", None, gate, K) for index, gate in enumerate(gates)
        ]
        self.model = SimpleNamespace(
            device=torch.device("cpu"),
            get_input_embeddings=lambda: self.embedding,
            get_submodule=lambda name: nn.Module(),
        )
        self.watcher = Watcher(self)
        self.inputs: list[torch.Tensor] = []  # of the routers in the last pass
        self.logits: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[Step]:
        """Run a pass."""
        kwargs = {} if mask is None else {"attention_mask": mask}
        self.watcher.begin_pass((ids,), kwargs)
        return self.steps(self.embedding(ids))

    def steps(self, x: torch.Tensor) -> list[Step]:
        self.inputs = [(index + 1) * x.flatten(0, 1) for index in range(L)]
        steps = []
        self.logits = []
        for layer, own in zip(self.layers, self.inputs, strict=True):
            logits, weights, ids = layer.gate(own)
            self.logits.append(logits)
            steps.append(self.watcher.step(layer.index, ids, weights.double()))
        return steps


@pytest.fixture
def tiny() -> Tiny:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Tiny()
    with torch.inference_mode():
        yield made


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
PADDED = torch.tensor([[0, 0, 1], [0, 1, 1]])
REAL = [2, 4, 5]


def test_a_step_is_what_the_router_chose(tiny: Tiny) -> None:
    passes: list[np.ndarray] = []
    seen: list[Step] = []
    assert tiny(IDS)[0].pass_index == 0
    tiny.watcher.on_pass = passes.append
    tiny.watcher.on_step = seen.append
    steps = tiny(IDS)
    assert [step.layer for step in steps] == [0, 1, 2] and seen == steps
    for step, logits in zip(steps, tiny.logits, strict=True):
        weights, ids = logits.softmax(-1).topk(K)
        assert np.array_equal(step.selected, ids) and np.array_equal(step.weights, weights)
        assert step.weights.dtype == np.float32 and step.last.tolist() == [2, 5]
        assert (step.pass_index, step.phase) == (1, PREFILL)
        assert [step.probabilities, step.predicted, step.learned, step.embedding] == [None] * 4
    assert [requests.tolist() for requests in passes] == [[0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize(("length", "phase"), [(1, DECODE), (2, PREFILL), (3, PREFILL)])
def test_a_pass_of_one_token_a_request_decodes(tiny: Tiny, length: int, phase: int) -> None:
    passes: list[np.ndarray] = []
    tiny.watcher.on_pass = passes.append
    tiny.watcher.first_request = 7
    assert {step.phase for step in tiny(IDS[:, :length])} == {phase}
    assert passes[0].tolist() == [7] * length + [8] * length and passes[0].dtype == np.int32


def test_ids_come_by_name_or_by_place_and_embeddings_stand_in_for_them(tiny: Tiny) -> None:
    watcher = tiny.watcher
    assert watcher.begin_pass((), {"input_ids": IDS}) == watcher.begin_pass((IDS, None), {}) == 6
    assert watcher.begin_pass((), {"inputs_embeds": tiny.embedding(IDS)}) == 6
    watcher.open_pass({})
    assert tiny.steps(tiny.embedding(IDS))[0].embedding is None


def test_padding_is_in_no_part_of_a_step(tiny: Tiny) -> None:
    tiny.watcher.see_probabilities()
    tiny.watcher.see_predictions(2)
    tiny.watcher.see_embeddings()
    passes: list[np.ndarray] = []
    tiny.watcher.on_pass = passes.append
    steps = tiny(IDS, PADDED)
    assert passes[0].tolist() == [0, 1, 1] and tiny.watcher.rows.tolist() == REAL
    for step, logits in zip(steps, tiny.logits, strict=True):
        assert np.array_equal(step.selected, logits.topk(K)[1][REAL])
        assert np.array_equal(step.probabilities, logits.softmax(-1)[REAL])
        assert step.predicted.shape == (3, 2, E) and step.last.tolist() == [0, 2]
    assert tiny(IDS)[0].selected.shape == (6, K) and tiny.watcher.rows is None


def test_the_embedding_of_a_request_is_the_mean_of_its_tokens_without_padding(tiny: Tiny) -> None:
    told: list[Opening] = []
    tiny.watcher.on_opening = told.append
    for _ in range(2):  # asked for twice, it is copied once
        tiny.watcher.see_embeddings()
    steps = tiny(IDS, PADDED)
    rows = tiny.embedding.weight[IDS].numpy()
    expected = np.stack([rows[0, 2], rows[1, 1:].mean(axis=0)])
    assert [(opening.pass_index, opening.phase) for opening in told] == [(0, PREFILL)]
    for embedding in (told[0].embedding, *(step.embedding for step in steps)):
        assert np.allclose(embedding, expected, atol=1e-6) and embedding.shape == (2, H)
    assert np.allclose(tiny(IDS)[0].embedding, rows.mean(axis=1), atol=1e-6)
    assert np.array_equal(tiny(IDS[:, :1])[0].embedding, rows[:, 0])


def test_embeddings_that_are_given_are_the_input(tiny: Tiny) -> None:
    told: list[Opening] = []
    tiny.watcher.see_embeddings()
    tiny.watcher.begin_pass((), given := {"inputs_embeds": tiny.embedding(IDS) + 1})
    tiny.watcher.open_pass(given)
    tiny.embedding(IDS)  # not the input
    step, *_ = tiny.steps(tiny.embedding.weight[IDS] + 1)
    assert np.allclose(step.embedding, tiny.embedding.weight[IDS].mean(dim=1) + 1, atol=1e-6)
    tiny.watcher.on_opening = told.append
    tiny.watcher.begin_pass((), {"inputs_embeds": tiny.embedding.weight[IDS]})
    assert not told, "the pass has to begin first, elsewhere too"
    tiny.watcher.open_pass({"inputs_embeds": tiny.embedding.weight[IDS]})
    assert [opening.pass_index for opening in told] == [1]


def test_probabilities_are_the_softmax_of_the_routers_own_logits(tiny: Tiny) -> None:
    for _ in range(2):  # asked for twice, routers are hooked once
        tiny.watcher.see_probabilities()
    assert [len(layer.gate._forward_hooks) for layer in tiny.layers] == [1, 1, 1]
    for step, logits in zip(tiny(IDS), tiny.logits, strict=True):
        assert (
            np.array_equal(step.probabilities, logits.softmax(-1))
            and step.predicted is step.learned is None
        )
    assert all(routed.x is routed.logits is None for routed in tiny.watcher._routed), (
        "a prompt's stay in memory"
    )


def predicted(tiny: Tiny, layer: int, ahead: int) -> torch.Tensor:
    return linear(tiny.inputs[layer], tiny.layers[(layer + ahead) % L].gate.weight).softmax(-1)


@pytest.mark.parametrize("distances", [[], [1], [2], [2, 1], [3]])
def test_predictions_are_what_the_next_routers_say_of_this_ones_input(
    tiny: Tiny, distances: list[int]
) -> None:
    for distance in distances:
        tiny.watcher.see_predictions(distance)
    if not distances:
        tiny.watcher.see_predictions()
    for _ in range(2):
        for step in tiny(IDS):
            assert (
                step.predicted.shape == (6, max(distances, default=1), E) and step.learned is None
            )
            for ahead in range(step.predicted.shape[1]):
                assert np.array_equal(
                    step.predicted[:, ahead], predicted(tiny, step.layer, ahead + 1)
                )


class Fitted:
    """Predictors that give what they are asked about, for two layers ahead."""

    def ahead(self, layer: int, x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, :3] * (layer + distance) for distance in (1, 2)]


def test_a_fitted_predictor_gives_what_is_learned(tiny: Tiny) -> None:
    tiny.watcher.see_predictions(0, Fitted())
    for step in tiny(IDS):
        assert step.predicted is None and step.learned.shape == (6, 2, 3)
    tiny.watcher.see_predictions(1)
    tiny.watcher.see_probabilities()
    for step, logits in zip(tiny(IDS), tiny.logits, strict=True):
        assert np.array_equal(step.probabilities, logits.softmax(-1))
        assert np.array_equal(step.predicted[:, 0], predicted(tiny, step.layer, 1))
        for ahead in range(2):
            assert np.array_equal(
                step.learned[:, ahead], tiny.inputs[step.layer][:, :3] * (step.layer + ahead + 1)
            )


def test_what_has_stopped_leaves_no_hook_and_can_begin_again(tiny: Tiny) -> None:
    hooked = (tiny.embedding, *(layer.gate for layer in tiny.layers))
    for _ in range(2):
        tiny.watcher.see_probabilities()
        tiny.watcher.see_embeddings()
        step, *_ = tiny(IDS)
        assert step.probabilities is not None and step.embedding is not None
        assert [len(module._forward_hooks) for module in hooked] == [1] * 4
        tiny.watcher.stop()
        assert not any(module._forward_hooks for module in hooked)
