"""LearnedMaps maps and the store that keeps them, without torch, for processes that are killed."""

from pathlib import Path

import numpy as np

from artifacts.routing.expert_maps import ExpertMaps
from artifacts.shape import Shape
from artifacts.store.expert_maps import latest_maps, stored_maps, stored_origins
from artifacts.store.runs import ModelInfo, utc_now
from artifacts.store.store import Store
from runtime.policies.shared.maps import LearnedMaps
from runtime.session.learn_maps import WrittenMaps, write_learned_maps

SHAPE = Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=100)
MODEL = ModelInfo("demo", "a" * 64, "olmoe", SHAPE)
HIDDEN = 3
CAPACITY = 8


def maps_of(seed: int, count: int, maps: ExpertMaps | None = None) -> ExpertMaps:
    random = np.random.default_rng(seed)
    maps = (
        maps
        if maps is not None
        else ExpertMaps(CAPACITY, num_layers=2, num_experts=4, hidden=HIDDEN, distance=1)
    )
    maps.add(random.standard_normal((count, HIDDEN)), random.dirichlet(np.ones(4), (count, 2)))
    return maps


def learned(seed: int, count: int, begun_with: ExpertMaps | None = None) -> LearnedMaps:
    """A run that began with these maps and saw `count` iterations of its request 0."""
    before = len(begun_with) if begun_with else 0
    maps = maps_of(seed, count, begun_with.copy() if begun_with else None)
    return LearnedMaps(
        maps,
        np.arange(before, before + count),
        np.stack([np.zeros(count), np.arange(count)], 1),
        count,
    )


def keep(path: Path, what: LearnedMaps, began_with: int | None) -> WrittenMaps:
    return write_learned_maps(
        what, store_path=path, model=MODEL, began_with=began_with, started_at=utc_now(), seconds=1.5
    )


def read(path: Path) -> tuple[ExpertMaps, np.ndarray, list[tuple[int, str]]]:
    with Store.open(path, read_only=True) as store:
        run_id = latest_maps(store, MODEL.model_id).run_id
        runs = [(run.run_id, run.info.command) for run in store.runs()]
        return stored_maps(store, run_id=run_id), stored_origins(store, run_id), runs
