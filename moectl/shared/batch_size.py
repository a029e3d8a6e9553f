"""Choice of the number of requests to answer at a time, by the memory left for their keys and
values and for a pass over them."""

from dataclasses import dataclass

import torch

from profilers.hardware.this_machine import LocalMachine
from runtime.devices import free_nbytes, is_host
from runtime.session.session import Session

MOST_ROWS = 256
# of what is free; of RAM, experts read from files want some as page cache
_OF_GPU = 0.8
_OF_RAM = 0.5
_LOGITS_SHARE = 4  # of that, one part for logits
_LOGIT_NBYTES = 12  # a float32 logit, its copy, and what is drawn from


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The largest number of requests that run at a time, and the bytes that their keys and values
    may take. Fewer run where the keys and values of long requests take more."""

    rows: int
    room: int


def batch_size(
    session: Session,
    rows: int | None,
    *,
    usual: int = MOST_ROWS,
    together: int = 1,
    in_ram: bool = False,
) -> BatchSize:
    """Return the size for a session that has just been opened, one of `together` in this memory.

    Keys and values lie beside the model, or `in_ram`. `rows` is the number asked for, None for as
    many as there is memory for, up to `usual`.
    """
    left = _left_nbytes(session.opened.model.device) // together
    vocabulary = session.opened.model.get_input_embeddings().num_embeddings
    fitting = max(1, left // _LOGITS_SHARE // (vocabulary * _LOGIT_NBYTES))
    room = _left_nbytes(torch.device("cpu")) // together if in_ram else left - left // _LOGITS_SHARE
    return BatchSize(rows or min(usual, fitting), room)


def _left_nbytes(device: torch.device) -> int:
    if is_host(device):
        return int(LocalMachine.glance("cpu", 1).available_nbytes * _OF_RAM)
    return int(free_nbytes(device) * _OF_GPU)
