"""The link: GB/s of copies of several sizes from page-locked memory, alone and on two streams at
once, and of a kernel that reads that memory itself. On a CPU copies within its memory, to try the
probe.

python -m tools.gpu.probes.link
"""

import time
from collections.abc import Callable

import torch

from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed

SIZES = (1 << 20, 4 << 20, 9 << 20, 64 << 20)
# bytes of one measurement; experts of a token
_MOVED = 1 << 30
_RANKS = 8


def main() -> None:
    options = parsed(__doc__)
    device = options.device
    moved = 1 << 24 if options.tiny else _MOVED
    for nbytes in SIZES[:2] if options.tiny else SIZES:
        turns = max(2, moved // nbytes)
        host = torch.ones(turns, nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
        there = torch.empty(turns, nbytes, dtype=torch.uint8, device=device)
        tell(
            name=f"copies of {nbytes >> 20} MiB",
            gbps=_gbps(lambda h=host, t=there: _copy(h, t), host.nbytes, device),
        )
        if device != "cpu":
            streams = [torch.cuda.Stream(device) for _ in range(2)]
            both = _gbps(lambda h=host, t=there, s=streams: _on_two(h, t, s), host.nbytes, device)
            tell(name=f"copies of {nbytes >> 20} MiB, on two streams", gbps=both)
            tell(
                name=f"eight of {nbytes >> 20} MiB, by a kernel", gbps=_filled_gbps(device, nbytes)
            )


def _filled_gbps(device: str, nbytes: int) -> float:
    """Return the GB/s at which a kernel by itself brings eight experts of `nbytes` bytes from
    page-locked memory."""
    from runtime.kernels.gpu.decide import fill

    words = nbytes // 4
    ranks = torch.arange(_RANKS, dtype=torch.int32, device=device)
    host = torch.ones(_RANKS, words, dtype=torch.int32, pin_memory=True)
    arena = torch.empty(_RANKS * words, dtype=torch.int32, device=device)
    starts = ranks.long() * words
    return _gbps(
        lambda: fill(host, starts, arena, ranks, ranks, first_key=0, first_slot=0),
        host.nbytes,
        device,
    )


def _copy(host: torch.Tensor, there: torch.Tensor) -> None:
    for source, target in zip(host, there, strict=True):
        target.copy_(source, non_blocking=True)


def _on_two(host: torch.Tensor, there: torch.Tensor, streams: list) -> None:
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            _copy(host[number::2], there[number::2])


def _gbps(work: Callable[[], None], nbytes: int, device: str) -> float:
    work()
    _finish(device)
    begin_s = time.perf_counter()
    work()
    _finish(device)
    return nbytes / (time.perf_counter() - begin_s) / 1e9


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
