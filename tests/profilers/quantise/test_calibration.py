"""Hessians equal those computed by hand; experts with few tokens, or none, still get good
replicas."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from artifacts.quantisation.gptq import Quantized, group_size_for, round_to_nearest
from artifacts.quantisation.replica_file import read_replica
from profilers.quantise import calibration
from profilers.quantise.calibration import (
    LayerInputs,
    LayerTokens,
    activations,
    describing,
    hessians,
    keep_inputs,
    output,
    spaced,
)
from profilers.quantise.lockstep import LayerBatch
from profilers.quantise.method import Method
from profilers.quantise.one_expert import ExpertTask, quantise
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint

T = 700
H = 32
K = 2


def arrived(seed: int = 0) -> list[LayerBatch]:
    """Two batches of correlated hidden states; the last rows of the second are padding."""
    random = np.random.default_rng(seed)
    mixing = np.random.default_rng(9).standard_normal((H, H)) * np.logspace(0, -2, H)[:, None]
    hidden = torch.from_numpy(random.standard_normal((T, H)) @ mixing).float()
    selected = np.argsort(random.random((T, 8)), axis=1)[:, :K]
    selected[-10:] = -1
    weights = torch.from_numpy(random.random((T, K))).float()
    return [
        LayerBatch(hidden[part], selected[part], weights[part])
        for part in (slice(0, 300), slice(300, T))
    ]


@pytest.fixture
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


def expert_weights(opened: MoeModel, expert: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    buffer = torch.zeros(opened.store.layout.nbytes, dtype=torch.uint8)
    opened.store.read(0, expert, buffer)
    return buffer.numpy(), opened.store.layout.views(buffer)


def test_rows_and_gates_are_those_of_the_router(tmp_path: Path) -> None:
    batches = arrived()
    hidden = torch.cat([batch.hidden for batch in batches])[: T - 10]
    selected = np.concatenate([batch.selected for batch in batches])[: T - 10]
    gates = torch.cat([batch.weights for batch in batches]).double().numpy()[: T - 10]
    inputs = keep_inputs(batches, tmp_path, 3)
    tokens = LayerTokens(batches)
    assert (inputs.num_tokens, inputs.width) == (T - 10, H)
    for expert in range(8):
        rows, weights = tokens.of(expert)
        assert np.array_equal(rows, np.flatnonzero((selected == expert).any(axis=1)))
        assert np.array_equal(weights, gates[selected == expert])
        assert torch.equal(torch.cat(list(inputs.read(rows))), hidden[rows])
    assert all(len(part) == 0 for part in tokens.of(8))


def test_hessians_by_hand(
    opened: MoeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_CHUNK", 50)
    batches = arrived()
    inputs = keep_inputs(batches, tmp_path, 0)
    rows, _ = LayerTokens(batches).of(2)
    module = pickle.loads(describing(opened.layers[0].experts))
    _, weights = expert_weights(opened, 2)
    x = torch.cat([batch.hidden for batch in batches])[: T - 10].double()
    y = activations(module, weights, x.float()).double()
    found = hessians(module, weights, inputs, rows)
    for name, values in (("gate_up_proj", x), ("down_proj", y)):
        own = values[rows]
        k = values.shape[1]
        expected = 2 / (len(rows) + k) * (own.T @ own + k * values.T @ values / len(values))
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def unit(opened: MoeModel, inputs: LayerInputs, rows: np.ndarray, path: Path) -> ExpertTask:
    return ExpertTask(
        path=path,
        model="m",
        layer=0,
        expert=2,
        method=Method(),
        module=describing(opened.layers[0].experts),
        layout=opened.store.layout,
        weights=expert_weights(opened, 2)[0],
        inputs=inputs,
        rows=rows,
        gates=np.ones(len(rows)),
    )


@pytest.mark.parametrize("num_own", [0, 16])
def test_a_starved_expert_beats_rounding_on_other_tokens(
    opened: MoeModel, tmp_path: Path, num_own: int
) -> None:
    inputs = keep_inputs(arrived(), tmp_path, 0)
    record = quantise(unit(opened, inputs, np.arange(num_own), tmp_path / "L000-E002.safetensors"))
    assert (record.metadata["basis"], record.metadata["samples"]) == ("layer", str(num_own))
    module = opened.layers[0].experts
    _, weights = expert_weights(opened, 2)
    held_out = torch.cat([batch.hidden for batch in arrived(seed=1)])
    exact = output(module, weights, held_out)
    for bits in (1, 2, 3, 4):
        replica = {
            name: Quantized.from_packed(part).dequantised()
            for name, part in read_replica(record.path, bits).items()
        }
        rounded = {
            name: round_to_nearest(weight, bits, group_size_for(weight.shape[1])).dequantised()
            for name, weight in weights.items()
        }
        mine, theirs = (
            float((output(module, each, held_out) - exact).square().mean())
            for each in (replica, rounded)
        )
        assert mine < theirs


def test_hidden_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    batches = arrived()
    batches[0].hidden[7, 3] = float("inf")
    with pytest.raises(BadInput, match="layer 5: hidden states on this text are NaN or infinite"):
        keep_inputs(batches, tmp_path, 5)


def test_a_sample_is_spread_over_all() -> None:
    assert spaced(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert spaced(10, 4).tolist() == [0, 2, 5, 7]
