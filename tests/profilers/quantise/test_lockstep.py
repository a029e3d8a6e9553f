"""In lockstep every layer has the inputs of the plain model, and the model the same output."""

import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from profilers.quantise.lockstep import Lockstep, batches
from runtime.engine.one_expert import OneExpertRunner, Routed
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY
from tests.profilers.quantise.layer_by_hand import layer_output

LENGTHS = (9, 12, 5, 12, 3, 7)
SEQUENCES = [
    np.random.default_rng(at).integers(3, VOCABULARY, length) for at, length in enumerate(LENGTHS)
]


def in_turn(opened: MoeModel, sequence: np.ndarray) -> list[Routed]:
    heard = []

    def keep(routed: Routed) -> np.ndarray:
        heard.append(routed)
        return routed.selected

    with OneExpertRunner(opened, keep) as runner:
        runner.forward(torch.from_numpy(sequence)[None])
    return heard


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_see_what_they_see_in_the_plain_model(family: str, checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint(family)))
    parts = batches(SEQUENCES, num_tokens=24)
    with torch.inference_mode(), Lockstep(opened, parts) as lockstep:
        seen = []
        for layer, arrived in lockstep.layers():
            seen.append(arrived)
            lockstep.put([layer_output(opened, layer, batch) for batch in arrived])
    for at, part in enumerate(parts):
        longest = len(part[0])
        for row, sequence in enumerate(part):
            for layer, routed in enumerate(in_turn(opened, sequence)):
                rows = slice(row * longest, row * longest + len(sequence))
                torch.testing.assert_close(
                    seen[layer][at].hidden[rows], routed.hidden, rtol=1e-4, atol=1e-5
                )
                assert np.array_equal(seen[layer][at].selected[rows], routed.selected)
                torch.testing.assert_close(
                    seen[layer][at].weights[rows], routed.weights, rtol=1e-4, atol=1e-5
                )
                padding = slice(rows.stop, (row + 1) * longest)
                assert (seen[layer][at].selected[padding] == -1).all()


def test_passes_that_run_at_once_give_the_same_bits(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("qwen2_moe")))
    parts = batches(SEQUENCES, num_tokens=12)
    seen = []
    for at_once in (1, 3):
        with torch.inference_mode(), Lockstep(opened, parts, at_once=at_once) as lockstep:
            for layer, arrived in lockstep.layers():
                seen += [
                    (batch.hidden, batch.weights, torch.from_numpy(batch.selected))
                    for batch in arrived
                ]
                lockstep.put([layer_output(opened, layer, batch) for batch in arrived])
    first, second = np.array_split(np.arange(len(seen)), 2)
    assert len(first) == len(second) > len(parts) > 3
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, seen[one], seen[other]))


def test_batches_are_full_and_in_a_fixed_order() -> None:
    parts = batches(SEQUENCES, num_tokens=24)
    assert [list(map(len, part)) for part in parts] == [[12, 12], [9, 7], [5, 3]]
    assert parts[0][0] is SEQUENCES[1] and parts[0][1] is SEQUENCES[3]
    assert [len(part) for part in batches(SEQUENCES, num_tokens=2)] == [1] * 6


def test_leaving_early_gives_the_model_back(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    before = in_turn(opened, SEQUENCES[0])[1].hidden
    with (
        pytest.raises(KeyboardInterrupt),
        torch.inference_mode(),
        Lockstep(opened, batches(SEQUENCES, num_tokens=24)) as it,
    ):
        for _ in it.layers():
            raise KeyboardInterrupt
    assert torch.equal(in_turn(opened, SEQUENCES[0])[1].hidden, before)


def test_what_the_model_raises_is_raised_here(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(str(checkpoint("olmoe")))

    def fail(module: object, args: object) -> None:
        raise ArithmeticError("on the way")

    handle = opened.layers[0].gate.register_forward_pre_hook(fail)
    with (
        pytest.raises(ArithmeticError, match="on the way"),
        Lockstep(opened, batches(SEQUENCES, num_tokens=24)) as it,
    ):
        next(it.layers())
    handle.remove()


def test_tokens_that_the_model_does_not_know_are_refused(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    with pytest.raises(BadInput):
        Lockstep(opened, [(np.array([1, VOCABULARY + 5]),)])
