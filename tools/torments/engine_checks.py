"""Invariants of a session after any fault: the controller's state, contents of slots, threads,
files, memory."""

import gc
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.session.session import Session
from tools.torments.cases import Lost


def check(session: Session, after: str) -> None:
    """Raises Lost unless the controller's state is consistent and every slot holds the expert
    assigned to it."""
    try:
        session.validate()
    except AssertionError as problem:
        raise Lost(f"17: after {after}: {problem}") from problem
    steps = session.engine.steps
    slow = session.parts.tiers.slow
    for place in filter(None, session.controller.cache.places):
        if place.slot in steps.pending:
            continue
        lies = steps.resident.room(place)
        should = torch.empty(lies.numel() + 64, dtype=torch.uint8)[: lies.numel()]
        slow.read(*divmod(place.key, session.opened.shape.num_experts), should, bits=place.bits)
        layout = slow.stores[place.bits].layout
        parts = zip(
            slow.weights(place, lies).items(), slow.weights(place, should).items(), strict=True
        )
        for (name, own), (_, theirs) in parts:
            if not torch.equal(own, theirs):
                raise Lost(
                    f"17: after {after}: slot {place.slot} does not hold {name} of key "
                    f"{place.key} ({layout})"
                )


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of a process: threads of moectl by name, open files, bytes of tensors."""

    threads: tuple[str, ...]
    num_files: int
    tensor_nbytes: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        tensors = [
            one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)
        ]
        storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
        names = sorted(
            thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
        )
        return cls(
            tuple(names),
            len(list(Path("/proc/self/fd").iterdir())),
            sum({one.data_ptr(): one.nbytes() for one in storages}.values()),
        )

    def check(self, before: "Held", what: str) -> None:
        """Raises Lost if more is held than before."""
        if self.threads != before.threads:
            raise Lost(f"17: {what} left threads: {self.threads}, before {before.threads}")
        if self.num_files > before.num_files:
            raise Lost(f"17: {what} left {self.num_files - before.num_files} open files")
        if self.tensor_nbytes > before.tensor_nbytes:
            raise Lost(
                f"17: {what} left {self.tensor_nbytes - before.tensor_nbytes:,} bytes of tensors"
            )
