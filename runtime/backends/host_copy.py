"""Copies from the device to the host: the tensors of a step that policies must see, and the tokens
of the near tier."""

import time
from collections.abc import Callable
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch

from artifacts.errors import OutOfResources
from runtime.devices import is_host
from runtime.kernels.load import compiler, kernels

_MOST = (1 << 30) - 1  # letters before their numbers begin anew
_POLLS = 4096  # between looks at the stream, which say whether the GPU still works
# looks at a letter until a thread sleeps between them, some 2 ms: one that sleeps wakes 60 us later
_SPINS = 16_384
_TURN = 32  # looks between calls of what is done meanwhile


class HostCopy:
    """Copies the tensors of a step that the host must see, in one piece, into a page-locked buffer
    that is kept.

    For many tokens the tensors are copied, and the host waits for an event of this copy alone. For
    one token a kernel writes them to the host, and the host polls: this needs no launch to pack, no
    copy and no event.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0)
        self._done = None if is_host(device) else torch.cuda.Event()
        self._mailbox = Mailbox(device) if compiler(device) == "triton" else None

    def __call__(self, tensors: list[torch.Tensor]) -> list[np.ndarray]:
        """Return [T, *] tensors as arrays: the first, of ids, as int64 and the others as
        float32."""
        if self._mailbox and tensors[0].shape[0] == 1:
            joint = self._mailbox(tensors)
        elif self._done is None:
            ids, *others = tensors
            return [ids.detach().numpy(), *[tensor.detach().float().numpy() for tensor in others]]
        else:
            joint = self._fetch(joined(tensors))
        return separated(joint, [tensor.shape[1] for tensor in tensors])

    def send(self, tensors: list[torch.Tensor]) -> "Letter":
        """Make the CUDA graph that is being captured send these [T, *] tensors each time it is
        replayed."""
        return self._mailbox.repeated(tensors)

    def _fetch(self, values: torch.Tensor) -> np.ndarray:
        """Copy `values` to the host; the next call overwrites the result."""
        if self._buffer.numel() < values.numel():
            self._buffer = page_locked(values.numel(), torch.float32)
        host = self._buffer[: values.numel()].view(values.shape)
        host.copy_(values, non_blocking=True)
        self._done.record(torch.cuda.current_stream(self._device))
        self._done.synchronize()
        return host.numpy()


class Mailbox:
    """Host memory that a kernel writes: the number of the letter, then its content."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = 0
        self._count = 1
        self._words = torch.empty(0, dtype=torch.int32)
        self._letter = self._words.numpy()  # the same memory

    def __call__(self, tensors: list[torch.Tensor]) -> np.ndarray:
        """Send the tensors of one token and return them joined as by `joined`, [1, sum of widths]
        float32; the next call overwrites the result. Raises OutOfResources where the GPU ends its
        work without writing it."""
        self._send(tensors)
        wait_for(self._letter, self._number, self._device)
        return self._letter[1 : self._count].view(np.float32)[None]

    def repeated(self, tensors: list[torch.Tensor]) -> "Letter":
        """Make the CUDA graph that is being captured send these tensors each time it is
        replayed."""
        self._send(tensors)
        widths = [tensor.shape[1] for tensor in tensors]
        return Letter(self._letter, self._number, len(tensors[0]), widths, self._device)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        ids, *others = tensors
        values = (
            others[0] if len(others) == 1 else torch.cat(others, dim=1) if others else ids[:, :0]
        )
        count = 1 + ids.numel() + values.numel()
        if self._words.numel() < count:
            self._words = page_locked(count, torch.int32)
            self._number = 0
            self._letter = self._words.numpy()
            self._letter[0] = 0
        self._number = self._number % _MOST + 1
        self._count = count
        kernels("gpu.mailbox").send(
            ids.contiguous(), values.contiguous(), self._words, self._number
        )


class Letter:
    """Message that a CUDA graph sends each time it is replayed, under a `number` that no other
    letter has. The host forgets the message before, and then waits for the number again."""

    def __init__(
        self,
        letter: np.ndarray,
        number: int,
        num_tokens: int,
        widths: list[int],
        device: torch.device,
    ) -> None:
        self._number = number
        self._num_tokens = num_tokens
        self._widths = widths
        self._device = device
        self._letter = letter  # kept: the graph knows the address only

    def forget(self) -> None:
        """Clear the number; call it before the graph is queued. The letter before has been read by
        then, so that nothing else writes there."""
        self._letter[0] = 0

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait for the letter, and call `meanwhile` again and again until it comes."""
        wait_for(self._letter, self._number, self._device, meanwhile)

    def read(self) -> list[np.ndarray]:
        """Return the same arrays as `HostCopy` for the same tensors. Waits for the letter."""
        if self._letter[0] != self._number:
            wait_for(self._letter, self._number, self._device)
        count = self._num_tokens
        content = self._letter[1 : 1 + count * sum(self._widths)].view(np.float32)
        if count == 1:
            return separated(content[None], self._widths)
        parts = np.split(content, [count * self._widths[0]])  # all ids come first
        return separated(np.hstack([part.reshape(count, -1) for part in parts]), self._widths)


class NumberedLetters:
    """Host memory for the last `COUNT` letters of `width` int32 each. The device numbers the
    letters itself. Every letter is sent in the same way, so that a CUDA graph can send it."""

    COUNT: ClassVar[int] = 16

    def __init__(self, device: torch.device, width: int) -> None:
        self._device = device
        self._number = 0
        self._words = page_locked(self.COUNT * (1 + width), torch.int32).zero_()
        self._letters = self._words.view(self.COUNT, -1).numpy()  # the same memory
        with torch.inference_mode(False):
            self._on_device = torch.zeros(1, dtype=torch.int32, device=device)

    def queue(self, values: torch.Tensor) -> None:
        """Make the device send these [width] int32 next."""
        kernels("gpu.mailbox").send_next(values, self._on_device, self._words, self.COUNT)

    def sent(self) -> int:
        """Note that the next letter was queued. Returns its number; `COUNT` letters later it is
        overwritten."""
        self._number = self._number % _MOST + 1
        return self._number

    def skip(self) -> None:
        """Skip numbers, so that no letter that was queued and not noted is taken for a later
        one."""
        self._number = (self._number + self.COUNT) % _MOST + 1
        self._on_device.fill_(self._number)

    def has_come(self, number: int) -> bool:
        """Return whether `read` would return at once."""
        return bool(self._letters[number % self.COUNT, 0] == number)

    def read(self, number: int) -> np.ndarray:
        """Return the values [width] of this letter. Waits for it."""
        letter = self._letters[number % self.COUNT]
        if not self.has_come(number):
            wait_for(letter, number, self._device)
        return letter[1:]


def wait_for(
    letter: np.ndarray,
    number: int,
    device: torch.device,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait until this number begins the letter, and call `meanwhile` from time to time. Raises
    OutOfResources where the GPU ends its work without it."""
    polls = 0
    while letter[0] != number:
        polls += 1
        if polls % _TURN == 0:
            meanwhile()
        if polls > _SPINS:
            time.sleep(0)  # other threads need the interpreter meanwhile
        if polls % _POLLS == 0 and _is_idle(device) and letter[0] != number:
            raise OutOfResources(
                "the GPU ended its work and did not send what the host waits for: run it again"
            )


def _is_idle(device: torch.device) -> bool:
    """Return whether the GPU has ended all work that is queued on its current stream. Raises the
    GPU's error if there was one."""
    return torch.cuda.current_stream(device).query()


class HostTokens:
    """Copies a step's tokens to the host, and the results that the host computes from them to the
    device. Each goes in one copy, through page-locked memory that is kept, while the device
    computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = has_streams(device)
        self._there = self._back = torch.empty(0, dtype=torch.uint8)
        self._fetched, self._sent = (
            (torch.cuda.Event(), torch.cuda.Event()) if self._has_streams else (None, None)
        )

    def fetch(self, hidden: torch.Tensor) -> None:
        """Begin to copy `hidden` [T, H] to the host."""
        self._tokens = hidden
        if self._has_streams:
            self._there = _with_room(self._there, hidden.nbytes)
            self._tokens = self._there[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)
            self._tokens.copy_(hidden, non_blocking=True)
            self._fetched.record(torch.cuda.current_stream(self._device))

    def there(self) -> torch.Tensor:
        """Return the tokens that `fetch` copied, once they are on the host; the next `fetch`
        overwrites them."""
        if self._has_streams:
            self._fetched.synchronize()
        return self._tokens

    def bring(self, numbers: np.ndarray, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `numbers` int64 [n] and `values` [n, H] on the device."""
        if not self._has_streams:
            return torch.from_numpy(numbers), values
        first = numbers.nbytes
        nbytes = numbers.nbytes + values.nbytes
        self._sent.synchronize()  # a copy of the step before may still read the memory
        self._back = _with_room(self._back, nbytes)
        self._back[:first].view(torch.int64).copy_(torch.from_numpy(numbers))
        self._back[first:nbytes].view(values.dtype).view(values.shape).copy_(values)
        on_device = self._back[:nbytes].to(self._device, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))
        return on_device[:first].view(torch.int64), on_device[first:].view(values.dtype).view(
            values.shape
        )


def has_streams(device: torch.device) -> bool:
    """Return whether the device computes and copies while the host goes on."""
    return not is_host(device)


def _with_room(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    return memory if memory.numel() >= nbytes else page_locked(nbytes, torch.uint8)


def page_locked(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor [count], page-locked where there is a GPU. It may be written
    both in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(count, dtype=dtype, pin_memory=torch.cuda.is_available())


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join all tensors into one [T, sum of widths] float32; the first, of ids, goes in as the bits
    of int32."""
    ids, *others = tensors
    return torch.cat([ids.int().view(torch.float32), *others], dim=1)


def separated(values: np.ndarray, widths: list[int]) -> list[np.ndarray]:
    """Return copies of the tensors that `joined` took: ids as int64, the others as float32. For one
    token the others are parts of one array."""
    first, *following = widths
    ids = values[:, :first].view(np.int32).astype(np.int64)
    others = values[:, first:]
    if len(values) == 1:
        others = others.copy()
        if len(following) == 1:
            return [ids, others]
    parts = [
        others[:, last - width : last]
        for width, last in zip(following, accumulate(following), strict=True)
    ]
    return [ids, *(parts if len(values) == 1 else map(np.array, parts))]


def real_rows(mask: torch.Tensor | None, batch: int, length: int) -> np.ndarray | None:
    """Return the rows of the flattened batch that are not padding; None when all are real, or for a
    mask of another kind."""
    # a decoded token is never padding
    if length == 1 or mask is None or mask.dim() != 2 or mask.shape[0] != batch:
        return None
    real = mask[:, -length:].reshape(-1).cpu().numpy().astype(bool)
    return None if real.all() else np.flatnonzero(real)
