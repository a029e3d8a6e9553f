"""Copies from the device to the host arrive unchanged, and outlive the buffer of the copy."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from artifacts.errors import OutOfResources
from runtime.backends import host_copy
from runtime.backends.host_copy import HostCopy, Mailbox, joined, page_locked, separated
from tests.helpers.triton_process import compiled, compiler, interpret, needs_triton

LETTERS = """
import numpy as np
import torch
from runtime.backends import host_copy
mailbox = host_copy.Mailbox(torch.device("cpu"))
random = torch.Generator().manual_seed(0)
cases = [((8, 8), torch.float32), ((8, 8), torch.float16), ((3, 60, 60), torch.float32), ((2,), torch.float32)]
for widths, dtype in cases:
    ids = torch.randint(0, 60000, (1, widths[0]), generator=random)
    others = [torch.rand(1, width, generator=random).to(dtype) for width in widths[1:]]
    ours, theirs = mailbox([ids, *others]), host_copy.joined([ids, *others]).numpy()
    print(int(np.array_equal(ours.view(np.int32), theirs.view(np.int32))), mailbox._words[0].item())
"""


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_ids_and_numbers_survive_one_buffer(num_tokens: int) -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 60000, (num_tokens, 3), generator=random)
    ids[0, 0] = 2_143_289_344  # the bits of a NaN
    others = [torch.rand(num_tokens, width, generator=random) for width in (3, 8)]
    buffer = joined([ids, *others]).numpy()
    arrays = separated(buffer, [3, 3, 8])
    buffer[:] = 0
    assert arrays[0].dtype == np.int64 and np.array_equal(arrays[0], ids.numpy())
    for array, other in zip(arrays[1:], others, strict=True):
        assert array.dtype == np.float32 and np.array_equal(array, other.numpy())


def test_on_a_cpu_nothing_is_copied() -> None:
    ids = torch.tensor([[3, 1]])
    weights = torch.tensor([[0.5, 0.25]])
    arrays = HostCopy(torch.device("cpu"))([ids, weights])
    assert arrays[0].ctypes.data == ids.data_ptr() and arrays[1].ctypes.data == weights.data_ptr()


def test_pageable_tensors_become_float32_on_a_cpu() -> None:
    ids, weights = HostCopy(torch.device("cpu"))(
        [torch.tensor([[3]]), torch.tensor([[0.5]], dtype=torch.bfloat16)]
    )
    assert ids.dtype == np.int64 and weights.dtype == np.float32


def test_its_buffer_is_written_in_and_out_of_inference_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session forwards in inference mode; transformers' `generate` runs without it, on another
    thread."""
    done = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    copy = HostCopy(torch.device("cpu"))
    found = []
    copy._done = done
    with torch.inference_mode():
        copy._fetch(torch.ones(1, 4))
        assert not page_locked(3, torch.int32).is_inference()
    thread = threading.Thread(target=lambda: found.append(copy._fetch(torch.full((1, 4), 2.0))))
    thread.start()
    thread.join()
    assert found[0].tolist() == [[2.0] * 4]


@needs_triton
def test_a_letter_has_the_bits_of_the_copy() -> None:
    assert interpret(LETTERS) == ["1 1", "1 2", "1 1", "1 2"]  # the third needs a larger buffer


NUMBERED = """
import torch
from runtime.backends import host_copy
letters, values = host_copy.NumberedLetters(torch.device("cpu"), 3), torch.tensor([5, 6, 7], dtype=torch.int32)
for _ in range(letters.COUNT + 2):
    letters.queue(values)
    last = letters.sent()
    values += 1
print(last, letters.read(last), letters.read(last - letters.COUNT + 1), letters.has_come(last - letters.COUNT))
letters.queue(values)  # and the token fails
letters.skip()
letters.queue(values + 1)
print(letters.read(letters.sent()), letters.has_come(last + 1))
"""


@needs_triton
def test_letters_that_the_device_numbers_stay_until_as_many_have_followed() -> None:
    """One that was sent for a token that failed is not taken for the next one."""
    assert interpret(NUMBERED) == ["18 [22 23 24] [7 8 9] False", "[24 25 26] True"]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_number_of_a_letter_is_released_to_the_whole_system(tmp_path, capability: int) -> None:
    from runtime.kernels.gpu.mailbox import _send, _send_next

    one = {"ids_ptr": "*i64", "values_ptr": "*bf16", "words_ptr": "*i32"}
    next_one = {"values_ptr": "*i32", "number_ptr": "*i32", "words_ptr": "*i32"}
    with compiler(tmp_path):
        codes = [
            compiled(kernel, capability, own, block=8)
            for kernel, own in ((_send, one), (_send_next, next_one))
        ]
    for code in codes:
        ptx = code["ptx"]
        assert (
            ptx.rindex("st.global") < ptx.rindex("bar") < ptx.index("atom.global.sys.release.exch")
        )


def test_a_letter_that_never_comes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "kernels", lambda name: SimpleNamespace(send=lambda *_: None))
    monkeypatch.setattr(host_copy, "_is_idle", lambda device: True)
    with pytest.raises(OutOfResources, match="did not send what the host waits for"):
        Mailbox(torch.device("cpu"))([torch.tensor([[3]]), torch.ones(1, 1)])
