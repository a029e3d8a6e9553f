"""Predictions on the device equal those computed by hand from the weights."""

import numpy as np
import pytest
import torch

from artifacts.errors import Incompatible
from artifacts.routing.predictors import Predictors, projection
from runtime.engine.fitted_predictor import Predictor
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint

HIDDEN = 6
FEATURES = 5
EXPERTS = 4
CPU = torch.device("cpu")


def random_predictors(
    hidden: int = HIDDEN, num_layers: int = 3, num_experts: int = EXPERTS
) -> Predictors:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(num_layers, 2, hidden + FEATURES + 1, num_experts)).astype(
        np.float32
    )
    return Predictors(np.linspace(0.5, 2, num_layers, dtype=np.float32), weights, FEATURES, seed=3)


def by_hand(predictors: Predictors, layer: int, distance: int, x: np.ndarray) -> np.ndarray:
    matrix, shift = projection(predictors.hidden, FEATURES, predictors.seed)
    mixed = predictors.scale[layer] * x @ matrix + shift
    features = np.concatenate([x, mixed / (1 + np.exp(-mixed)), np.ones((len(x), 1))], axis=1)
    odds = np.exp(features @ predictors.weights[layer, distance - 1])
    return odds / odds.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("distance", [1, 2])
def test_distributions_of_the_layers_ahead(distance: int) -> None:
    predictors = random_predictors()
    x = np.random.default_rng(1).normal(size=(7, HIDDEN)).astype(np.float32)
    predictor = Predictor(predictors, distance, CPU)
    for layer in range(3):
        distributions = predictor.ahead(layer, torch.from_numpy(x)[None])
        assert len(distributions) == distance
        for ahead, p in enumerate(distributions, start=1):
            np.testing.assert_allclose(p.numpy(), by_hand(predictors, layer, ahead, x), atol=1e-5)


def test_a_predictor_of_shorter_distance_is_refused() -> None:
    with pytest.raises(Incompatible, match="moectl build-predictor --distance 3"):
        Predictor(random_predictors(), 3, CPU)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2"])
def test_steps_carry_predictions_from_the_routers_own_inputs(
    family: str, checkpoint: Checkpoint
) -> None:
    opened = open_model(str(checkpoint(family)))
    shape = opened.shape
    inputs = []
    steps = []
    hidden = opened.model.get_input_embeddings().weight.shape[1]
    predictors = random_predictors(hidden, shape.num_layers, shape.num_experts)
    with Session(opened, Settings(budget="50%")) as session:
        session.watcher.see_predictions(2, Predictor(predictors, 2, CPU))
        session.watcher.on_step = steps.append
        handles = [
            gate.register_forward_hook(lambda m, a, o: inputs.append(a[0].flatten(0, -2).numpy()))
            for gate in (layer.gate for layer in opened.layers)
        ]
        session.forward(torch.arange(3, 9)[None])
        for handle in handles:
            handle.remove()
    assert len(steps) == shape.num_layers
    for step, x in zip(steps, inputs, strict=True):
        assert step.learned.shape == step.predicted.shape == (6, 2, shape.num_experts)
        for distance in (1, 2):
            np.testing.assert_allclose(
                step.learned[:, distance - 1],
                by_hand(predictors, step.layer, distance, x),
                atol=1e-5,
            )
        assert step.foreseen is step.learned
