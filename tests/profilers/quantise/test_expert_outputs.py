"""Outputs that workers write add up to the bits of the layer, in whatever order they come."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import OutOfResources
from profilers.quantise.calibration import LayerTokens, describing, keep_inputs
from profilers.quantise.expert_outputs import LayerSum
from profilers.quantise.lockstep import Lockstep, batches
from runtime.model.layout import aligned
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY
from tests.profilers.quantise.layer_by_hand import layer_output

SEQUENCES = [
    np.random.default_rng(at).integers(3, VOCABULARY, length)
    for at, length in enumerate((9, 12, 5, 3))
]


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_the_sum_of_what_workers_write_is_the_layers_output(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    opened = open_model(str(checkpoint(family)))
    host = aligned(opened.store.layout.nbytes)
    parts = batches(SEQUENCES, num_tokens=24)
    with torch.inference_mode(), Lockstep(opened, parts) as lockstep:
        for layer, arrived in lockstep.layers():
            tokens = LayerTokens(arrived)
            inputs = keep_inputs(arrived, tmp_path, layer.index)
            total = LayerSum(arrived, tokens, tmp_path, opened.sum_dtype)
            module = pickle.loads(describing(layer.experts))
            for expert in reversed(total.missing.copy()):
                opened.store.read(layer.index, expert, host)
                total.wanted(expert).write(
                    module, opened.store.layout.weights(host), inputs, torch.device("cpu")
                )
                total.add(expert)
            assert not list(tmp_path.glob("*.outputs"))
            expected = [layer_output(opened, layer, batch) for batch in arrived]
            assert all(torch.equal(*pair) for pair in zip(total.totals(), expected, strict=True))
            lockstep.put(expected)


def test_a_layer_whose_sum_nobody_wants_and_an_expert_without_tokens(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    with (
        torch.inference_mode(),
        Lockstep(opened, batches(SEQUENCES[-1:], num_tokens=24)) as lockstep,
    ):
        _, arrived = next(iter(lockstep.layers()))
        tokens = LayerTokens(arrived)
        assert LayerSum([], tokens, tmp_path, torch.float32).totals() == []
        total = LayerSum(arrived, tokens, tmp_path, torch.float32)
        [unused, *_] = set(range(opened.shape.num_experts)) - set(total.missing)
        assert total.wanted(unused) is None


def test_a_full_disk_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    host = aligned(opened.store.layout.nbytes)
    opened.store.read(0, 0, host)
    with torch.inference_mode(), Lockstep(opened, batches(SEQUENCES, num_tokens=24)) as lockstep:
        layer, arrived = next(iter(lockstep.layers()))
        total = LayerSum(arrived, LayerTokens(arrived), tmp_path, torch.float32)
        wanted = total.wanted(total.missing[0])
        inputs = keep_inputs(arrived, tmp_path, 0)
        wanted.path.symlink_to("/dev/full")
        with pytest.raises(OutOfResources, match="no space left"):
            wanted.write(
                layer.experts, opened.store.layout.weights(host), inputs, torch.device("cpu")
            )
