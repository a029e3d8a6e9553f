"""Page-locking: the rate at which memory is written for the first time, and at which the driver
locks it.

python -m tools.gpu.probes.pages
"""

import time

from artifacts.common.host_memory import host_memory
from runtime.links.page_lock import PageLock
from runtime.model.huge_pages import anonymous, shares
from tools.gpu.groups import tell
from tools.gpu.probes.options import parsed

# 1 to 64 GiB
SIZES = tuple(1 << power for power in range(30, 37))
TINY = (1 << 20, 4 << 20)


class _Owner:
    """Keeps memory locked."""


def main() -> None:
    options = parsed(__doc__)
    for nbytes in TINY if options.tiny else SIZES:
        if nbytes > 0.8 * host_memory()[1]:
            tell(name=f"{nbytes >> 20} MiB", why_not="not that much memory is available")
            return
        memory = anonymous(nbytes)
        owner = _Owner()
        touch_s = _seconds(lambda memory=memory: memory.fill_(1))
        figures = {
            "touch_gbps": nbytes / touch_s / 1e9,
            "huge_pages": shares({"memory": [memory]})["memory"],
        }
        if options.device != "cpu":
            lock = PageLock(memory, owner)
            figures["lock_gbps"] = (
                nbytes / _seconds(lambda lock=lock, nbytes=nbytes: lock.lock_to(nbytes)) / 1e9
            )
        tell(name=f"{nbytes >> 20} MiB", **figures)
        del owner, memory


def _seconds(work) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
