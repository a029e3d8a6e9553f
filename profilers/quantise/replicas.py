"""Builds replicas of every expert of a model: layer by layer, one file per expert, then all rows of
the store at once.

After an interruption the same call continues with the experts whose files are missing, and writes
the same bytes. Memory is bounded by one layer's inputs (hidden states of the calibration text) and
one expert per worker.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from artifacts.common.locks import locked
from artifacts.errors import BadInput, OutOfResources, Partly
from artifacts.quantisation.replica_file import (
    SOURCE,
    check_identity,
    is_intact,
    read_metadata,
    replica_root,
)
from artifacts.store.runs import ModelInfo
from artifacts.store.store import add_run
from profilers.quantise.calibration import LayerInputs, LayerTokens, describing, keep_inputs
from profilers.quantise.expert_outputs import LayerSum
from profilers.quantise.lockstep import LayerBatch, Lockstep, batches, one_thread
from profilers.quantise.method import (
    Method,
    check_method,
    expected_nbytes,
    made_by,
    no_smaller,
    projections,
    smaller,
)
from profilers.quantise.one_expert import (
    LOSS_TOKENS,
    ExpertDone,
    ExpertTask,
    ReplicaRecord,
    record,
    tables,
    work,
    write_outputs,
)
from profilers.text.batches import Data
from profilers.text.run import TextRun, computed_on
from profilers.workers.workers import (
    Executor,
    Processes,
    Workers,
    listed_losses,
    return_large_buffers,
)
from runtime.devices import is_host
from runtime.model.layers import MoeLayer
from runtime.model.layout import aligned
from runtime.model.open import MoeModel

QUANTIZE = "quantize"
BATCH_TOKENS = 4096  # rows of a batch, with padding
_HERE = Processes(1)
_MOST_LOST_AT_FIRST = 4  # experts lost before any is done show that the cause is not in the experts

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BuiltReplicas:
    """Replicas that were written. An earlier run that was stopped had done `resumed` of the
    experts, and `remade` more of other weights than the checkpoint has. Widths `skipped` are no
    smaller than the checkpoint's experts."""

    run_id: int
    folder: Path
    records: tuple[ReplicaRecord, ...]
    num_tokens: int
    seconds: float
    resumed: int
    remade: int
    recipe: str
    skipped: tuple[int, ...] = ()
    shortfall: str = ""  # as in `Data`


def build_replicas(
    opened: MoeModel,
    data: Data,
    method: Method,
    *,
    model: ModelInfo,
    store_path: Path,
    read: Mapping[str, object] | None = None,
    executor: Executor = _HERE,
    progress: Progress = lambda done, total: None,
) -> BuiltReplicas:
    """Quantise every expert and write the run; workers write its files. `read` are the options by
    which the data was read, which the run keeps. `progress` is told the experts done and the
    experts in all.

    Raises BadUsage for a method that this model does not allow; BadInput for a checkpoint that
    changes meanwhile; OutOfResources for a full disk, for workers that are all killed and for a
    folder that another process is filling; Partly when some experts could not be quantised.
    """
    run = TextRun(data)
    shapes = projections(opened.layers[0])
    check_method(method, shapes)
    asked = method.bits
    method = smaller(method, opened)
    folder = replica_root(store_path) / f"{model.model_id}-{_identity(method, run.digest)}"
    with _owning(folder):
        job = _Job(opened, method, folder, model.fingerprint, progress)
        job.take_up()
        resumed = len(job.records)
        job.check_space(expected_nbytes(method, shapes))
        job.run(data.sequences, executor)
        parameters = asdict(method) | {"folder": folder.name, "sequences": len(data.sequences)}
        parameters |= {
            "no_smaller": no_smaller(method, opened),
            "expert_format": opened.expert_format,
        }
        parameters |= {**(read or {}), **computed_on(opened)}
        info = run.info(QUANTIZE, model, parameters)
        records = tuple(job.records[key] for key in range(opened.shape.num_keys))
        opened.store.check_unchanged()
        run_id = add_run(store_path, info, tables(records), model=model)
    skipped = tuple(bits for bits in asked if bits not in method.bits)
    counts = (info.tokens, info.seconds, resumed, job.num_of_others)
    return BuiltReplicas(run_id, folder, records, *counts, method.recipe, skipped, data.shortfall)


class _Job:
    """The quantisation of one model; `records` holds the finished experts by key, and
    `num_of_others` counts files that were of other weights."""

    _sum: LayerSum  # of the present layer

    def __init__(
        self, opened: MoeModel, method: Method, folder: Path, model: str, progress: Progress
    ) -> None:
        self._opened = opened
        self._method = method
        self._folder = folder
        self._model = model
        self._progress = progress
        self._host = aligned(opened.store.layout.nbytes)
        self.records: dict[int, ReplicaRecord] = {}
        self.num_of_others = 0
        self._lost: dict[int, Exception] = {}
        self._num_done = 0

    def take_up(self) -> None:
        """Record the experts whose files an earlier run finished from the weights that the
        checkpoint has now, which reads each of them once, and remove its unfinished ones."""
        for path in self._folder.glob(".*.tmp"):
            path.unlink()
        for key in range(self._opened.shape.num_keys):
            path = self._path(key)
            if path.is_file() and (source := self._source(path, key)):
                if source == self._present_source(key):
                    self.records[key] = record(path)
                else:
                    self.num_of_others += 1

    def check_space(self, nbytes: int) -> None:
        """Raise OutOfResources if the disk cannot take the missing files of `nbytes` each."""
        needed = nbytes * (self._opened.shape.num_keys - len(self.records))
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise OutOfResources(
                f"the replicas take {needed / 2**20:,.1f} MiB and the disk of {self._folder} has "
                f"{free / 2**20:,.1f} MiB left: free some, name a store on another disk, or give "
                "fewer --bits"
            )

    def run(self, sequences: Sequence[np.ndarray], executor: Executor) -> None:
        """Quantise every expert without a record. Raises Partly when some are lost."""
        num_experts = self._opened.shape.num_experts
        num_keys = self._opened.shape.num_keys
        self._progress(len(self.records), num_keys)
        missing = [key for key in range(num_keys) if key not in self.records]
        if not missing:
            return
        return_large_buffers()
        last = missing[-1] // num_experts
        parts = batches(sequences, num_tokens=BATCH_TOKENS)
        if not is_host(self._opened.model.device):
            executor = _HERE  # a GPU is one place to compute
        with (
            one_thread(),
            torch.inference_mode(),
            _scratch_folder(self._folder.absolute()) as scratch,
            Lockstep(
                self._opened, parts, at_once=min(executor.count, os.cpu_count() or 1)
            ) as lockstep,
            Workers(work, executor, self._done) as workers,
        ):
            for layer, arrived in lockstep.layers():
                outputs = self._layer(layer, arrived, workers, scratch, is_last=layer.index == last)
                if layer.index == last:
                    break
                lockstep.put(outputs)
        if self._lost:
            raise Partly(self._loss_message())

    def _layer(
        self,
        layer: MoeLayer,
        arrived: list[LayerBatch],
        workers: Workers,
        scratch: Path,
        *,
        is_last: bool,
    ) -> list[torch.Tensor]:
        """Have workers compute each expert's outputs, unless this is the last layer, and quantise
        those without a record. Returns the layer's output [T, H] of each batch."""
        # the inputs are of one checkpoint; each file names its expert's bytes
        self._opened.store.check_unchanged()
        tokens = LayerTokens(arrived)
        self._sum = LayerSum([] if is_last else arrived, tokens, scratch, self._opened.sum_dtype)
        unit = partial(self._unit, layer, keep_inputs(arrived, scratch, layer.index), tokens)
        for expert in range(self._opened.shape.num_experts):
            if self._key(layer, expert) not in self.records or expert in self._sum.missing:
                workers.submit(unit(expert), expert)
        self._finish(layer, unit, workers)
        return self._sum.totals()

    def _finish(self, layer: MoeLayer, unit: Callable[[int], ExpertTask], workers: Workers) -> None:
        """Wait for the layer's experts and note the experts that are lost after all attempts; their
        outputs, which the next layers need, are computed here."""
        lost = workers.persist(lambda expert: workers.submit(unit(expert), expert))
        self._lost |= {self._key(layer, expert): error for expert, error in lost.items()}
        if len(self._lost) >= _MOST_LOST_AT_FIRST and not self._num_done:
            raise next(iter(lost.values()))
        for expert in [each for each in self._sum.missing if each in lost]:
            write_outputs(unit(expert))
            self._sum.add(expert)

    def _loss_message(self) -> str:
        shape = self._opened.shape
        of_layer = [divmod(key, shape.num_experts) for key in self._lost]
        names = [f"layer {layer} expert {expert}" for layer, expert in of_layer]
        return listed_losses(self._lost, f"{shape.num_keys} experts", "done", names)

    def _unit(
        self, layer: MoeLayer, inputs: LayerInputs, tokens: LayerTokens, expert: int
    ) -> ExpertTask:
        """Return the task of an expert. Its weights are read anew into the same memory."""
        self._opened.store.read(layer.index, expert, self._host)
        rows, gates = tokens.of(expert)
        key = self._key(layer, expert)
        return ExpertTask(
            path=None
            if key in self.records
            else self._path(key).absolute(),  # a worker may be in another folder
            model=self._model,
            layer=layer.index,
            expert=expert,
            method=self._method,
            module=describing(layer.experts),
            layout=self._opened.store.layout,
            weights=self._host.numpy(),
            inputs=inputs,
            rows=rows,
            gates=gates,
            outputs=self._sum.wanted(expert),
            device=str(self._opened.model.device),
        )

    def _done(self, done: ExpertDone) -> None:
        if done.record:
            self.records[done.layer * self._opened.shape.num_experts + done.expert] = done.record
            self._num_done += 1
            self._progress(len(self.records), self._opened.shape.num_keys)
        if done.has_outputs:
            self._sum.add(done.expert)

    def _source(self, path: Path, key: int) -> str | None:
        """Return the hash of the expert that a file was made of; None unless it is whole and of
        this model and key."""
        with suppress(BadInput):
            metadata = read_metadata(path)
            check_identity(
                path, metadata, model=self._model, key=divmod(key, self._opened.shape.num_experts)
            )
            return metadata.get(SOURCE) if is_intact(path) else None

    def _present_source(self, key: int) -> str:
        self._opened.store.read(*divmod(key, self._opened.shape.num_experts), self._host)
        return self._opened.store.layout.digest(self._host)

    def _key(self, layer: MoeLayer, expert: int) -> int:
        return layer.index * self._opened.shape.num_experts + expert

    def _path(self, key: int) -> Path:
        layer, expert = divmod(key, self._opened.shape.num_experts)
        return self._folder / f"L{layer:03}-E{expert:03}.safetensors"


def _identity(method: Method, digest: str) -> str:
    """Return 8 hexadecimal digits of everything but the model that the files' bytes depend on."""
    settings = (
        asdict(method)
        | made_by(method.recipe)
        | {
            "data": digest,
            "batch": BATCH_TOKENS,
            "loss": LOSS_TOKENS,
        }
    )
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


@contextmanager
def _owning(folder: Path) -> Iterator[None]:
    """Make the folder and lock it against other processes; a folder that is left empty is removed
    at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with locked(path, busy=f"another moectl quantize is filling {folder}: wait until it ends"):
        try:
            yield
        finally:
            _leave(folder, path)


def _leave(folder: Path, lock: Path) -> None:
    """Remove the folder if it is empty. Only the holder of the lock may: a folder just begun looks
    empty to others."""
    with suppress(OSError):  # another process has moved the folder or begun to fill it
        if [*folder.iterdir()] == [lock]:
            lock.unlink()
            folder.rmdir()
        if not [*folder.parent.iterdir()]:
            folder.parent.rmdir()


@contextmanager
def _scratch_folder(replicas: Path) -> Iterator[Path]:
    """An empty folder beside the replicas, removed at the end."""
    folder = replicas / ".scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
