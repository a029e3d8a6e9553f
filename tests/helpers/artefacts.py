"""A small store with every kind of artefact that a run can read, for a model of 2 layers of 4
experts."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from artifacts.hardware.profile import COMMAND as PROFILE_HARDWARE
from artifacts.hardware.profile import Compute, HardwareProfile, Load, NearCompute, Spread
from artifacts.hardware.profile import to_rows as hardware_rows
from artifacts.quantisation.gptq import round_to_nearest
from artifacts.quantisation.replica_file import (
    file_hash,
    replica_nbytes,
    replica_root,
    write_replicas,
)
from artifacts.quantisation.widths import USUAL_WIDTHS
from artifacts.routing.expert_maps import ExpertMaps
from artifacts.routing.predictors import Predictors, predictor_rows
from artifacts.routing.similarity import Similarity
from artifacts.shape import Shape
from artifacts.store.expert_maps import map_rows
from artifacts.store.presets import StoredPreset
from artifacts.store.presets import to_rows as preset_rows
from artifacts.store.rows import buddy_rows, curve_rows, similarity_rows, split_rows
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.store import Store
from artifacts.traces.parquet import to_table
from artifacts.traces.synthetic import Dials, generate
from artifacts.traces.trace import Trace

SHAPE = Shape(num_layers=2, num_experts=4, top_k=2, expert_nbytes=3 * 64 * 32 * 2)
MODEL = ModelInfo("small", "d" * 64, "olmoe", SHAPE)
PRESET = StoredPreset(
    "tuned", "standard", "none", "lru", "fetch", "uniform", "layer", "50%", "here", 0.0, 1.0, 1.0
)
NUM_INPUTS = {"gate_up_proj": 64, "down_proj": 32}
_ROOM = (SHAPE.num_layers, SHAPE.num_experts)
_SPREAD = Spread(1e-3, 1e-5, 5)


def trace(tokens: int = 24) -> Trace:
    return generate(Dials(tokens=tokens, requests=2, prompt=4), SHAPE)


def fill(path: Path) -> Path:
    """Write the store and the replica files beside it."""
    with Store.open(path) as store:
        store.add_model(MODEL)
        for command, parameters, tables in _runs(path):
            store.write_run(
                RunInfo(command, MODEL.model_id, utc_now(), 0.0, parameters=parameters), tables
            )
    return path


def write_replica(path: Path, key: int, widths: tuple[int, ...] = USUAL_WIDTHS) -> Path:
    """One expert's file."""
    rng = torch.Generator().manual_seed(key)
    weights = {name: torch.randn(64, size, generator=rng) for name, size in NUM_INPUTS.items()}
    replicas = {
        bits: {
            name: round_to_nearest(weight, bits, 32).packed() for name, weight in weights.items()
        }
        for bits in widths
    }
    layer, expert = divmod(key, SHAPE.num_experts)
    write_replicas(
        path, replicas, {"model": MODEL.fingerprint, "layer": str(layer), "expert": str(expert)}
    )
    return path


def _runs(path: Path) -> list[tuple[str, dict, dict[str, pa.Table]]]:
    rng = np.random.default_rng(0)
    q = rng.random((*_ROOM, SHAPE.num_experts))
    similarity = Similarity(q, q, rng.random(_ROOM), np.ones(_ROOM, np.int64))
    entropy = pa.table(
        {
            "layer": np.arange(SHAPE.num_layers, dtype=np.uint16),
            "percentiles": list(np.sort(rng.random((SHAPE.num_layers, 101), np.float32))),
            "histogram": [[1, 2, 3]] * SHAPE.num_layers,
        }
    )
    curves = (rng.random((2, 5)), rng.random((2, 4)), rng.random((2, 4, 5)))
    split = (np.full(2, 3.0), np.zeros(2), np.full(2, 0.5), np.full(2, 2))
    asked = {"budget_bytes": SHAPE.nbytes // 2, "solver": "greedy", "zeta": 0.1, "link": "disk"}
    latencies = {"attention_s": 1e-3, "moe_s": 1e-3, "head_s": 1e-3, "load_s": 1e-3}
    maps = ExpertMaps(4, num_layers=2, num_experts=4, hidden=3, distance=1)
    maps.add(rng.random((2, 3), np.float32), rng.random((2, 2, 4), np.float32))
    predictors = Predictors(np.ones(2, np.float32), rng.random((2, 1, 6, 4), np.float32), 2, 0)
    told = {name: np.zeros((2, 1)) for name in ("recall", "next_gate_recall", "frequent_recall")}
    told |= {"samples": np.ones((2, 1), np.int64), "target": np.full((2, 1), "logits", object)}
    near = (NearCompute(16, 1, _SPREAD),)
    conditions = {"device": "cpu", "link": "disk"}
    hardware = HardwareProfile(
        (Compute(1, *[_SPREAD] * 4),), (Load("disk", _SPREAD, 1.0),), near, conditions
    )
    return [
        (
            "profile",
            {},
            {
                "entropy": entropy,
                "similarity": similarity_rows(similarity),
                "traces": to_table(trace()),
            },
        ),
        (
            "build-buddies",
            {"alpha": [0.9] * 2},
            {"buddies": buddy_rows([[[1, 2], [0], [3], [2]]] * 2, q)},
        ),
        (
            "split",
            asked | {"latencies": latencies},
            {"curves": curve_rows(*curves), "splits": split_rows(*split)},
        ),
        (
            "build-maps",
            {"dtype": "float32", "distance": 1, "capacity": 4},
            {"expert_maps": map_rows(maps, np.zeros((2, 2), np.int64))},
        ),
        ("build-predictor", {"features": 2}, {"predictors": predictor_rows(predictors, told)}),
        (PROFILE_HARDWARE, dict(hardware.conditions), {"hardware": hardware_rows(hardware)}),
        ("tune", {}, {"presets": preset_rows([PRESET])}),
        ("quantize", {}, _replicas(replica_root(path))),
    ]


def _replicas(root: Path) -> dict[str, pa.Table]:
    (root / "run").mkdir(parents=True)
    losses = []
    files = []
    for key in range(SHAPE.num_keys):
        path = write_replica(root / "run" / f"{key}.safetensors", key)
        layer, expert = divmod(key, SHAPE.num_experts)
        for bits, nbytes in replica_nbytes(path).items():
            place = {"layer": layer, "expert": expert, "bits": bits}
            loss = 0.5**bits
            losses.append(
                place
                | {
                    "mse": loss,
                    "relative": loss,
                    "samples": 9,
                    "basis": "own",
                    "gated": loss,
                    "energy": 1.0,
                }
            )
            files.append(
                place | {"file": f"run/{path.name}", "nbytes": nbytes, "hash": file_hash(path)}
            )
    return {"quant_loss": pa.Table.from_pylist(losses), "replicas": pa.Table.from_pylist(files)}
