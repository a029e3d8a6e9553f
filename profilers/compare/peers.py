"""Measures other programs on the same checkpoint and text: plain transformers, Accelerate with
offloading, llama.cpp.

Each measurement runs in a process of its own, without moectl's registered experts and cached
weights.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from logging import ERROR, getLogger
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from artifacts.errors import BadInput, OutOfResources
from profilers.compare.bench import BenchSample, BenchSetting, BenchText, sample_of
from profilers.compare.llama_cpp import LlamaCpp, check_installed
from profilers.compare.quality import TextReading, read_by
from profilers.export.gguf import export_gguf
from profilers.workers.workers import Processes, Workers
from runtime.control import sizes
from runtime.devices import is_host, kind_of, resolve_device
from runtime.model.files.locate import is_gguf
from runtime.model.gguf.file import open_gguf
from runtime.model.open import MoeModel

EVERYTHING = "100%"  # the budget of a peer without offloading


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to run the checkpoint: transformers' experts implementation, and where Accelerate
    offloads to: `disk`, `cpu` or, if empty, nowhere; or llama.cpp on a GGUF file of type `gguf`."""

    name: str
    experts: str = "grouped_mm"
    offload: str = ""
    gguf: str = ""

    @property
    def link(self) -> str:
        """The link that its weights are loaded over, as a bench names it."""
        return {"disk": "disk", "cpu": "cuda"}.get(self.offload, "none")


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers-eager", "eager"),
        Peer("transformers-batched", "batched_mm"),
        Peer("transformers-grouped", "grouped_mm"),
        Peer("accelerate-disk", offload="disk"),
        Peer("accelerate-cpu", offload="cpu"),
        *(Peer(f"llama.cpp-{type_}", gguf=type_) for type_ in ("bf16", "q8_0", "q4_0", "mxfp4")),
    )
}


@dataclass(frozen=True, slots=True)
class PeerTask:
    """The measurement of a process. Where a peer offloads, weights may take `memory_nbytes` on the
    device that computes. `folder` is the checkpoint, or llama.cpp's file."""

    peer: Peer
    folder: Path
    device: str
    threads: int
    sequences: tuple[np.ndarray, ...]
    prefill: int
    memory_nbytes: int


@dataclass(frozen=True, slots=True)
class PeerReading:
    """A peer's reading; `expert_nbytes` of experts and `memory_nbytes` of all weights were on the
    device."""

    reading: TextReading
    expert_nbytes: int
    memory_nbytes: int

    @classmethod
    def of(cls, reading: TextReading, held: Mapping[str, int], *, experts: str) -> "PeerReading":
        """Add up the bytes `held` by name; names of experts contain `experts`."""
        expert_nbytes = sum(nbytes for name, nbytes in held.items() if experts in name)
        return cls(reading, expert_nbytes, sum(held.values()))


def check(peer: Peer, device: str) -> None:
    """Raise BadInput for a peer that cannot run here."""
    if peer.offload == "cpu" and is_host(resolve_device(device)):
        raise BadInput(
            f"{peer.name} needs a GPU: without one the CPU's memory is what computes, and is no "
            "slow tier"
        )
    if peer.offload and find_spec("accelerate") is None:
        raise BadInput(f"{peer.name} needs Accelerate: pip install 'moectl[peers]'")
    if peer.gguf:
        check_installed()
        if not is_host(resolve_device(device)):
            raise BadInput(f"{peer.name} is measured on a CPU: give --device cpu")


class PeerBench:
    """Measures peers on the text of a bench."""

    def __init__(self, opened: MoeModel, folder: Path, text: BenchText, *, threads: int) -> None:
        self._opened = opened
        self._folder = folder
        self._text = text
        self._threads = threads
        self._other_nbytes = sum(
            tensor.nbytes for tensor in opened.model.parameters() if not tensor.is_meta
        )
        self._scratch = tempfile.TemporaryDirectory(prefix="moectl-gguf-")

    def measure(self, setting: BenchSetting, full: TextReading) -> BenchSample:
        """Measure a peer in a process of its own, with quality against the reading of the `full`
        model. The budget is for experts; all other weights are added to it. Raises a Problem for a
        peer that cannot run here."""
        begin_s = perf_counter()
        if is_gguf(self._folder):
            raise BadInput(
                f"{setting.preset} does not read {self._folder.name}: moectl compares on "
                "safetensors"
            )
        peer = PEERS[setting.preset]
        device = str(self._opened.model.device)
        check(peer, device)
        task = PeerTask(
            peer,
            self._gguf(peer.gguf) if peer.gguf else self._folder,
            device,
            self._threads,
            self._text.sequences,
            self._text.prefill,
            self._other_nbytes + sizes.budget_nbytes(setting.budget, self._opened.shape),
        )
        found = read_apart(task)
        return sample_of(
            found.reading, full, self._text, fast_nbytes=found.expert_nbytes, begin_s=begin_s
        )

    def _gguf(self, type_: str) -> Path:
        """The model as a GGUF file, which is written once and removed with this object."""
        path = Path(self._scratch.name) / f"{type_}.gguf"
        if not path.exists():
            export_gguf(self._opened, self._folder, path, type_)
        return path


def read_apart(task: PeerTask) -> PeerReading:
    """Measure in a process of its own. Raises OutOfResources when the model does not fit, BadInput
    as `check`."""
    check(task.peer, task.device)
    readings: list[PeerReading] = []
    executor = Processes(2)  # 1 would be this process
    with Workers(
        _read_numpy, executor, lambda peer: readings.append(_converted(peer, torch.from_numpy))
    ) as workers:
        workers.submit(task)
        for error in workers.finish().values():
            raise error
    return readings[0]


def read_here(task: PeerTask) -> PeerReading:
    """Load the model and read the text after its first sequence has warmed all caches."""
    if task.peer.gguf:
        return _read_gguf(task)
    torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory(prefix="moectl-peer-") as scratch:
        model = _load(task, scratch)
        device = resolve_device(task.device)

        def forward(ids: torch.Tensor, past: object) -> object:
            return model(ids, past_key_values=past, use_cache=True)

        with torch.inference_mode():
            read_by(forward, task.sequences[:1], prefill=task.prefill, device=device)
            reading = read_by(forward, task.sequences, prefill=task.prefill, device=device)
        held = {
            name: tensor.nbytes
            for name, tensor in model.named_parameters()
            if kind_of(tensor.device) == kind_of(device)
        }
        return PeerReading.of(reading, held, experts=".experts.")


def _read_gguf(task: PeerTask) -> PeerReading:
    tensors = open_gguf(task.folder).tensors
    length = max(map(len, task.sequences))
    vocab_size = tensors["token_embd.weight"].shape[0]
    llama = LlamaCpp(task.folder, threads=task.threads, num_tokens=length, vocab_size=vocab_size)
    llama.read(task.sequences[:1], prefill=task.prefill)
    reading = llama.read(task.sequences, prefill=task.prefill)
    held = {name: tensor.nbytes for name, tensor in tensors.items()}
    return PeerReading.of(reading, held, experts="_exps.")


def _load(task: PeerTask, scratch: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("accelerate").setLevel(ERROR)
    device = resolve_device(task.device)
    options = {"experts_implementation": task.peer.experts, "dtype": "auto"}
    if task.peer.offload:
        near = "cpu" if is_host(device) else 0
        beyond = {"cpu": torch.iinfo(torch.int64).max} if task.peer.offload == "cpu" else {}
        options |= {
            "device_map": "auto",
            "max_memory": {near: task.memory_nbytes} | beyond,
            "offload_folder": scratch,
        }
    try:
        model = AutoModelForCausalLM.from_pretrained(task.folder, **options).eval()
        return model if task.peer.offload else model.to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfResources(
            f"{task.peer.name}: the whole model does not fit into memory"
        ) from error


def _read_numpy(task: PeerTask) -> PeerReading:
    """Return the reading with arrays: a tensor would be in shared memory that ends with its
    process."""
    return _converted(read_here(task), torch.Tensor.numpy)


def _converted(peer: PeerReading, convert: Callable) -> PeerReading:
    reading = peer.reading
    logits = convert(reading.logits)
    targets = convert(reading.targets)
    return replace(peer, reading=replace(reading, logits=logits, targets=targets))
