"""Measures how long one expert takes to quantise, before all of them are begun."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from profilers.quantise.calibration import describing, keep_inputs
from profilers.quantise.lockstep import LayerBatch, one_thread
from profilers.quantise.method import Method
from profilers.quantise.one_expert import ExpertTask, quantise
from runtime.model.layout import aligned
from runtime.model.open import MoeModel

_MOST_TOKENS = 16384  # of the layer, read and kept for the measurement


def expert_s(
    opened: MoeModel, method: Method, num_tokens: int, *, clock: Callable[[], float] = perf_counter
) -> float:
    """Return the seconds that a worker needs for an average expert on a text of `num_tokens`
    tokens: the first expert, with random inputs, by `clock`. Code that is compiled on first use is
    compiled before."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), one_thread():
        task = _task(opened, method, num_tokens, Path(folder))
        _run(_task(opened, method, 2 * opened.shape.num_experts, Path(folder)), clock)
        return _run(task, clock)


def _run(task: ExpertTask, clock: Callable[[], float]) -> float:
    begin_s = clock()
    quantise(task)
    return clock() - begin_s


def _task(opened: MoeModel, method: Method, num_tokens: int, folder: Path) -> ExpertTask:
    layer = opened.layers[0]
    shape = opened.shape
    host = aligned(opened.store.layout.nbytes)
    count = max(1, min(num_tokens, _MOST_TOKENS))
    hidden = torch.randn(
        count, opened.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    selected = np.zeros((count, shape.top_k), np.int64)
    hidden = hidden.to(opened.model.device, opened.dtype)
    inputs = keep_inputs(
        [LayerBatch(hidden, selected, torch.ones(count, shape.top_k))], folder, count
    )
    rows = np.arange(max(1, min(count, num_tokens * shape.top_k // shape.num_experts)))
    opened.store.read(0, 0, host)
    return ExpertTask(
        path=folder / "expert.safetensors",
        model=opened.fingerprint,
        layer=0,
        expert=0,
        method=method,
        module=describing(layer.experts),
        layout=opened.store.layout,
        weights=host.numpy(),
        inputs=inputs,
        rows=rows,
        gates=np.ones(len(rows)),
        device=str(opened.model.device),
    )
