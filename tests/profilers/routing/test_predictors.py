"""Predictors find a linear map, choose targets on held-out text, and beat the bundled model's
routers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput, BadUsage
from artifacts.shape import Shape
from artifacts.store.predictors import load_predictors
from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from moectl.bundled import demo_model
from profilers.routing.predictor_fit import Recall, RidgeFit, RouterBatch, TargetTuning, choose
from profilers.routing.predictors import PredictorPlan, build_predictors, observe_inputs
from profilers.text.batches import Batching, Data
from profilers.text.corpus import documents, token_sequences
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint

pytestmark = pytest.mark.slow

SHAPE = Shape(num_layers=2, num_experts=5, top_k=2, expert_nbytes=1)


def linear(num_tokens: int, seed: int) -> RouterBatch:
    """Layer 1's logits are linear in layer 0's inputs; layer 0's logits of the next token are
    linear in layer 1's."""
    maps = np.random.default_rng(9).normal(size=(2, 6, 5)).astype(np.float32)
    x = np.random.default_rng(seed).normal(size=(2, num_tokens, 6)).astype(np.float32)
    first = np.concatenate([np.zeros((1, 5), np.float32), x[1, :-1] @ maps[1]])
    tensors = [
        [torch.from_numpy(part) for part in parts] for parts in (x, (first, x[0] @ maps[0] + 1))
    ]
    return RouterBatch(*tensors, predicted=[], following=torch.arange(num_tokens - 1))


def test_ridge_finds_a_linear_map_and_adds_over_batches() -> None:
    fits = [RidgeFit(SHAPE, distance=2, num_features=3, seed=0) for _ in range(2)]
    whole = linear(200, 1)
    fits[0].add(whole)
    fits[1].add(
        RouterBatch(
            [x[:120] for x in whole.inputs], [z[:120] for z in whole.logits], [], torch.arange(119)
        )
    )
    # The second half's first token has no predecessor, the first half's last token no successor.
    fits[1].scale[:] = fits[0].scale
    fits[1].add(
        RouterBatch(
            [x[119:] for x in whole.inputs], [z[119:] for z in whole.logits], [], torch.arange(80)
        )
    )
    unseen = linear(50, 2)
    weights = fits[0].solve()["logits"]
    for layer in range(2):
        rows, logits = unseen.ahead(layer, 1)
        said = fits[0].features(unseen, layer)[rows] @ torch.from_numpy(weights[layer, 0])
        assert float((said - logits).abs().max()) < 0.05
    assert fits[0].num_samples == 200 and fits[0].use.sum() == 2 * 2 * 200
    # One token was counted twice; everything else agrees.
    np.testing.assert_allclose(fits[1].solve()["logits"][:, 0], weights[:, 0], atol=0.05)


def test_recall_counts_the_selected_among_the_named() -> None:
    recall = Recall(SHAPE, 1)
    named = torch.tensor([[9.0, 8, 0, 0, 0], [9.0, 8, 0, 0, 0]])
    wanted = torch.tensor([[5.0, 0, 4, 0, 0], [4.0, 5, 0, 0, 0]])
    recall.add((1, 0), named, wanted)
    assert recall.mean().tolist() == [[0.0], [0.75]]


def test_the_better_target_is_chosen_and_scaled_for_its_likelihood() -> None:
    seen = linear(300, 3)
    fit = RidgeFit(SHAPE, distance=1, num_features=0, seed=0)
    fit.add(seen)
    candidates = fit.solve()
    candidates["selected"][0] = 0  # says nothing of layer 1
    candidates["logits"] *= 0.25
    tuned = {name: TargetTuning(SHAPE, 1) for name in candidates}
    for name, weights in candidates.items():
        tuned[name].add(linear(100, 4), fit, weights)
    weights, target = choose(candidates, tuned)
    assert target[0, 0] == "logits"
    np.testing.assert_allclose(weights[0, 0], 4 * candidates["logits"][0, 0], atol=1e-6)


def test_inputs_and_successors_are_those_of_the_text(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    sequences = [np.arange(3, 3 + length) for length in (6, 2, 4)]
    with Session(opened, Settings(budget="50%")) as session:
        [(_, seen)] = observe_inputs(
            session, Batching(batch=3, length=8, prefill=0).batches(sequences), 1
        )
        assert session.watcher.on_step is None
    assert [x.shape for x in seen.inputs] == [(12, 32)] * opened.shape.num_layers
    assert seen.following.tolist() == [0, 1, 2, 3, 4, 6, 8, 9, 10]
    gate = opened.layers[1].gate
    again = type(gate).forward(gate, seen.inputs[0])[0].softmax(-1)
    torch.testing.assert_close(seen.predicted[0][:, 0], again, atol=1e-5, rtol=0)
    own = type(gate).forward(gate, seen.inputs[1])[0]
    torch.testing.assert_close(seen.logits[1], own, atol=1e-5, rtol=0)
    rows, logits = seen.ahead(opened.shape.num_layers - 1, 1)
    assert torch.equal(rows, seen.following) and torch.equal(
        logits, seen.logits[0][seen.following + 1]
    )


def bundled(tmp_path: Path, tokens: int, plan: PredictorPlan, batch: int = 8):
    opened = open_model(str(demo_model()))
    sequences = list(
        token_sequences(documents("builtin"), opened.tokenizer, length=128, num_tokens=tokens)
    )
    model = ModelInfo("demo", opened.fingerprint, opened.family, opened.shape)
    with Session(opened, Settings(budget="100%")) as session:
        return build_predictors(
            session,
            Data("builtin", sequences),
            Batching(batch=batch, length=128, prefill=0),
            plan,
            model=model,
            store_path=tmp_path / "moe.duckdb",
        )


def test_they_beat_the_routers_on_text_they_never_saw(tmp_path: Path) -> None:
    fitted = bundled(tmp_path, 6000, PredictorPlan(distance=2, features=64))
    recalls = {name: values.mean(axis=0) for name, values in fitted.recalls.items()}
    assert (recalls["learned"] > recalls["next_gate"] + 0.02).all()
    assert (recalls["next_gate"] > recalls["random"]).all() and (
        recalls["most frequent"] > recalls["random"]
    ).all()
    with Store.open(tmp_path / "moe.duckdb", read_only=True) as store:
        [model] = store.models()
        read = load_predictors(store, model.model_id, model.shape)
        [run] = store.runs()
    assert np.array_equal(read.weights, fitted.predictors.weights)
    assert (
        run.info.tokens == fitted.num_tokens == 6000
        and run.info.parameters["tested"] == fitted.num_tested
    )
    again = bundled(tmp_path, 6000, PredictorPlan(distance=2, features=64))
    assert np.array_equal(again.predictors.weights, fitted.predictors.weights)


def test_too_little_text_or_too_far_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="too few"):
        bundled(tmp_path, 100, PredictorPlan(distance=1))
    with pytest.raises(BadUsage, match="1 to 8"):
        bundled(tmp_path, 2000, PredictorPlan(distance=9))
