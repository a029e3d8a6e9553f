"""One expert on its way to a GPU: the bytes that were handed over to a stream, and the events for
which its slot waits."""

import threading
from dataclasses import dataclass

from runtime.links.cuda_events import Copy, StreamPoint
from runtime.links.link import ThreadTransfer, Wanted


@dataclass(eq=False, slots=True)
class CudaTransfer(ThreadTransfer):
    """A transfer to a GPU. `num_handed` of its `nbytes` bytes were handed over to a stream, the
    last of them by `copy`. `place` is the address of the slot. `is_taken`: the thread hands over no
    more. `unread`: after it, compute no longer reads the slot's old contents; None once a stream
    waits for it."""

    nbytes: int = 0
    place: int = 0
    unread: StreamPoint | None = None
    num_handed: int = 0
    copy: Copy | None = None
    is_taken: bool = False

    @property
    def is_whole(self) -> bool:
        """True if all bytes of the transfer were handed over."""
        return self.num_handed == self.nbytes


def to_transfer(load: Wanted, urgency: int, landed: threading.Event) -> CudaTransfer:
    """Return a transfer of this load; nothing of it is handed over yet."""
    key, slot, bits = load
    # by place: by name they would take Python three times as long
    has_started = False
    error = None
    return CudaTransfer(
        key, slot, urgency, bits, has_started, landed, error, slot.nbytes, slot.data_ptr()
    )
