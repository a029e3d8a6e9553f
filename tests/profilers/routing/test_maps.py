"""Iterations equal those of decoding token by token with the plain model; stored maps consist of
them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.errors import BadUsage
from artifacts.store.expert_maps import TABLE, stored_maps
from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from profilers.routing.maps import (
    BuiltMaps,
    ExpertMapPlan,
    Iterations,
    build_maps,
    observe_iterations,
)
from profilers.text.batches import Batching, Data
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import VOCABULARY

LENGTHS = (10, 7, 3, 10, 2, 8)
SEQUENCES = [np.random.default_rng(at).integers(3, VOCABULARY, n) for at, n in enumerate(LENGTHS)]
BATCHING = Batching(batch=4, length=10, prefill=4)
NUM_ITERATIONS = sum(1 + max(0, length - 4) for length in LENGTHS)


def by_hand(opened: MoeModel, folder: str, prefill: int) -> Iterations:
    """Iterations of the plain model's prefill and decode steps, with hooks on its own routers."""
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    names = {module: name for name, module in opened.model.named_modules()}
    heard: list[torch.Tensor] = []
    for layer in opened.layers:
        gate = plain.get_submodule(names[layer.gate])
        gate.register_forward_hook(
            lambda module, args, output: heard.append(output[0].softmax(-1).mean(dim=0))
        )
    found = []
    for request, sequence in enumerate(SEQUENCES):
        past = None
        parts = [
            part for part in np.split(sequence, range(max(prefill, 1), len(sequence))) if len(part)
        ]
        for iteration, part in enumerate(parts):
            ids = torch.from_numpy(part)[None]
            with torch.inference_mode():
                past = plain(input_ids=ids, past_key_values=past, use_cache=True).past_key_values
                embedding = plain.get_input_embeddings()(ids)[0].mean(dim=0)
            found.append((request, iteration, embedding.numpy(), torch.stack(heard).numpy()))
            heard.clear()
    return Iterations(*(np.array(column) for column in zip(*found, strict=True)))


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("prefill", [4, 0])
def test_iterations_are_those_of_decoding(
    family: str, prefill: int, checkpoint: Checkpoint
) -> None:
    folder = str(checkpoint(family))
    opened = open_model(folder)
    batching = Batching(batch=4, length=10, prefill=prefill)
    with Session(opened, Settings(budget="25%")) as session:
        seen = [
            part
            for _, part in observe_iterations(session, batching.batches(SEQUENCES), prefill=prefill)
        ]
        assert session.watcher.on_step is None and session.watcher.on_pass is None
    expected = by_hand(opened, folder, prefill)
    for name in ("request", "iteration"):
        assert np.array_equal(
            np.concatenate([getattr(part, name) for part in seen]), getattr(expected, name)
        )
    for name in ("embeddings", "probabilities"):
        found = np.concatenate([getattr(part, name) for part in seen])
        assert found == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-6)
    opened.store.close()


def build(
    opened: MoeModel, path: Path, plan: ExpertMapPlan, heard: list[tuple[int, int]] | None = None
) -> BuiltMaps:
    model = ModelInfo("a model", opened.fingerprint, opened.family, opened.shape)
    advance = (
        (lambda done, total: heard.append((done, total)))
        if heard is not None
        else (lambda done, total: None)
    )
    with Session(opened, Settings(budget="25%")) as session:
        return build_maps(
            session,
            Data("a test", SEQUENCES, 3),
            BATCHING,
            plan,
            model=model,
            store_path=path,
            progress=advance,
        )


def test_everything_fits(opened: MoeModel, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    built = build(opened, tmp_path / "moe.duckdb", ExpertMapPlan(capacity=100, distance=2), heard)
    assert (len(built.maps), built.num_iterations, built.num_requests) == (
        NUM_ITERATIONS,
        NUM_ITERATIONS,
        len(LENGTHS),
    )
    assert built.maps.num_replaced == 0 and built.num_tokens == sum(LENGTHS)
    assert heard == [(30, 40), (40, 40)]
    with Store.open(tmp_path / "moe.duckdb", read_only=True) as store:
        rows = store.read(TABLE, built.run_id)
        run = store.run(built.run_id)
        found = stored_maps(store, model_id=opened.fingerprint[:16])
    origins = [
        (at, step) for at, length in enumerate(LENGTHS) for step in range(1 + max(0, length - 4))
    ]
    assert (
        list(zip(rows["request"].to_pylist(), rows["iteration"].to_pylist(), strict=True))
        == origins
    )
    assert found.probabilities.sum(axis=2) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(found.probabilities, built.maps.probabilities) and found.distance == 2
    assert (
        run.info.parameters["iterations"] == NUM_ITERATIONS and run.info.parameters["replaced"] == 0
    )
    assert (run.info.seed, run.info.tokens, run.info.data) == (3, 40, "a test")


def test_a_small_store_keeps_its_capacity_and_says_where_maps_come_from(
    opened: MoeModel, tmp_path: Path
) -> None:
    whole = build(opened, tmp_path / "whole.duckdb", ExpertMapPlan(capacity=100, distance=1))
    built = build(opened, tmp_path / "small.duckdb", ExpertMapPlan(capacity=5, distance=1))
    again = build(opened, tmp_path / "again.duckdb", ExpertMapPlan(capacity=5, distance=1))
    assert len(built.maps) == 5 and built.maps.num_replaced == NUM_ITERATIONS - 5
    assert np.array_equal(built.maps.probabilities, again.maps.probabilities)
    with Store.open(tmp_path / "whole.duckdb") as store:
        origins = store.read(TABLE, 1).select(["request", "iteration"]).to_pylist()
    with Store.open(tmp_path / "small.duckdb") as store:
        rows = store.read(TABLE, 1).select(["request", "iteration"]).to_pylist()
    for place, origin in enumerate(rows):
        assert np.array_equal(
            built.maps.probabilities[place], whole.maps.probabilities[origins.index(origin)]
        )


def test_a_distance_beyond_the_layers_is_refused_before_anything_runs(
    opened: MoeModel, tmp_path: Path
) -> None:
    with pytest.raises(BadUsage, match="distance must be 1 to 2"):
        build(opened, tmp_path / "moe.duckdb", ExpertMapPlan(distance=3))
    assert not list(tmp_path.iterdir())
