"""The forms of an export: buddies, splits, a placement, a profile, a CSV of routing, an option of
llama.cpp."""

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from artifacts.store.rows import (
    activation_matrices,
    buddy_matrices,
    entropy_percentiles,
    split_columns,
)
from artifacts.store.runs import ModelInfo, StoredRun
from artifacts.store.store import Store
from moectl.shared.opening import open_quietly
from runtime.control import sizes

_BLOCK = re.compile(r"\.(\d+)\.")
# llama.cpp's own names, one tensor for all experts of a layer
_TENSORS = "ffn_(up|down|gate|gate_up)_(ch|)exps"


@dataclass(frozen=True, slots=True)
class Exportable:
    """A run of an open store, the model that it is of, and the budget of a placement."""

    store: Store
    run: StoredRun
    model: ModelInfo
    budget: str

    @property
    def size(self) -> tuple[int, int]:
        return self.model.shape.num_layers, self.model.shape.num_experts

    def read(self, table: str) -> pa.Table:
        return self.store.read(table, self.run.run_id)

    def counts(self) -> np.ndarray:
        """Return how many tokens selected each expert [L, E], over all phases."""
        by_phase = activation_matrices(self.read("activations"), *self.size)
        return sum(count for count, _ in by_phase.values())


def find(
    store: Store, what: str, *, run_id: int | None, model: ModelInfo | None, budget: str
) -> Exportable:
    """Return the run asked for, else the newest one that fits, of `model` if one is named. Raises
    Incompatible when no run fits."""
    table, command = _SOURCES.get(what, ("activations", "moectl profile"))
    by_id = {info.model_id: info for info in ([model] if model else store.models())}
    of = f" of {model.name}" if model else ""
    lacks = f"{table}{of}: run {command} first"
    run = store.run_with(table, run_id, lacks=lacks, model_ids=by_id)
    return Exportable(store, run, by_id[run.info.model_id], budget)


def buddies(source: Exportable) -> dict[str, object]:
    """Return the buddy lists by layer and pivot, strongest buddy first, with their q."""
    table, q = buddy_matrices(source.read("buddies"), *source.size)
    lists = [[row[row >= 0].tolist() for row in layer] for layer in table]
    shares = [
        [share[row >= 0].tolist() for row, share in zip(*layer, strict=True)]
        for layer in zip(table, q, strict=True)
    ]
    return _head(source) | {"parameters": source.run.info.parameters, "buddies": lists, "q": shares}


def splits(source: Exportable) -> dict[str, object]:
    """Return by layer: budget in experts, cached experts, theta, expected stall."""
    budgets, exposed_s, theta, cached = split_columns(source.read("splits"))
    names = ("layer", "budget", "cache_size", "theta", "exposed_s")
    columns = (
        range(len(budgets)),
        budgets.tolist(),
        cached.tolist(),
        theta.tolist(),
        exposed_s.tolist(),
    )
    layers = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return _head(source) | {"parameters": source.run.info.parameters, "layers": layers}


def placement(source: Exportable) -> dict[str, object]:
    """Return by layer the most used experts that fit the budget, and the share of requests that
    they cover."""
    counts = source.counts()
    hot = hottest(counts, source)
    layers = [np.flatnonzero(row).tolist() for row in hot]
    covers = float(counts[hot].sum() / max(int(counts.sum()), 1))
    return _head(source) | {
        "budget": source.budget,
        "experts": int(hot.sum()),
        "covers": covers,
        "layers": layers,
    }


def profile(source: Exportable) -> dict[str, object]:
    """Return counts and weights by phase, layer and expert, and percentiles of token activating
    entropy by layer."""
    by_phase = activation_matrices(source.read("activations"), *source.size)
    phases = {
        name: {"count": count.tolist(), "weight": weight.tolist()}
        for name, (count, weight) in by_phase.items()
    }
    record = _head(source) | {
        "data": source.run.info.data,
        "tokens": source.run.info.tokens,
        "phases": phases,
    }
    if "entropy" in source.run.contents:
        record["entropy"] = entropy_percentiles(source.read("entropy")).tolist()
    return record


def routing(source: Exportable) -> str:
    """Return the routing profile as CSV, one line for each phase, layer and expert."""
    rows = source.read("activations")
    out = io.StringIO()
    names = ["phase", "layer", "expert", "count", "weight"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        rows.select(names).sort_by([(name, "ascending") for name in names[:3]]).to_pylist()
    )
    return out.getvalue()


def override_tensor(source: Exportable) -> str:
    """Return the option of llama.cpp that keeps cold layers in host memory.

    It names MoE layers by their numbers among all layers, of which earlier ones may be dense.
    llama.cpp holds all experts of a
    layer in one tensor, so a layer stays or goes as a whole. As many layers stay as the budget
    holds, those with the most of the hottest experts first.
    """
    layers = open_quietly(source.model.name, device="cpu").layers
    blocks = [int(_BLOCK.search(layer.name)[1]) for layer in layers]
    hot = hottest(source.counts(), source).sum(axis=1)
    fitting = int(sizes.budget_nbytes(source.budget, source.model.shape) // _layer_nbytes(source))
    kept = sorted(np.argsort(-hot, kind="stable")[:fitting].tolist())
    away = [str(block) for layer, block in enumerate(blocks) if layer not in kept]
    if not away:
        return "--n-gpu-layers 999\n"
    return f'--n-gpu-layers 999 --override-tensor "blk\\.({"|".join(away)})\\.{_TENSORS}=CPU"\n'


def hottest(counts: np.ndarray, source: Exportable) -> np.ndarray:
    """Return [L, E]: whether an expert is among the most used that fit the budget; ties go to the
    lower key."""
    fitting = sizes.num_slots(source.budget, source.model.shape, per_layer=False)
    order = np.argsort(-counts, axis=None, kind="stable")[:fitting]
    is_hot = np.zeros(counts.size, bool)
    is_hot[order] = True
    return is_hot.reshape(counts.shape)


def _layer_nbytes(source: Exportable) -> int:
    shape = source.model.shape
    return shape.num_experts * shape.expert_nbytes


def _head(source: Exportable) -> dict[str, object]:
    model = source.model
    shape = source.model.shape
    return {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "num_layers": shape.num_layers,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "run": source.run.run_id,
    }


FORMS: Mapping[str, Callable[[Exportable], dict[str, object] | str]] = {
    "buddies": buddies,
    "splits": splits,
    "placement": placement,
    "profile": profile,
    "routing": routing,
    "override-tensor": override_tensor,
}
_SOURCES = {
    "buddies": ("buddies", "moectl build-buddies"),
    "splits": ("splits", "moectl split"),
}
