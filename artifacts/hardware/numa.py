"""Memory spread over the nodes of a machine that has several (NUMA). Cores of every node read
experts; memory that one thread wrote first would lie on its node, and be read at that node's rate.

Linux alone has these calls, `mbind(2)` and `get_mempolicy(2)`, without a name in libc.
"""

import platform
from collections.abc import Sequence
from ctypes import CDLL, byref, c_int, c_ulong, c_void_p
from functools import cache
from pathlib import Path

from artifacts.common.host_memory import lines_of

POLICIES = ("default", "preferred", "bind", "interleave", "local")
"""Of memory, by the kernel's numbers; `default` is the node of the core that first writes it."""

_INTERLEAVE = POLICIES.index("interleave")
_OF_ADDRESS = 2  # MPOL_F_ADDR
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}  # the numbers of both calls
_BITS = 64  # of a word of a mask


def nodes_with_memory(root: Path = Path("/")) -> tuple[int, ...]:
    """Return the numbers of the nodes on which this process may have memory; none where the system
    does not say. `root` has the folders `sys` and `proc`."""
    having = lines_of(root / "sys/devices/system/node/has_memory")
    status = lines_of(root / "proc/self/status")
    allowed = [line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")]
    return tuple(sorted(_numbers(having) & _numbers(allowed)))


def _numbers(lines: Sequence[str]) -> set[int]:
    """Return the numbers of lists such as `0-1,4`."""
    spans = [span.split("-") for line in lines for span in line.strip().split(",") if span]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


@cache
def several_nodes() -> tuple[int, ...]:
    """Return the nodes over which memory is spread; none where there is one, or where the process
    was started with a policy of its own, as by numactl."""
    nodes = nodes_with_memory()
    return nodes if len(nodes) > 1 and policy_of(None) == POLICIES[0] else ()


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Spread unwritten memory, from the beginning of a page on, over nodes page by page. Where the
    system refuses, as in containers without CAP_SYS_NICE, the memory is as good on one node, and
    `policy_of` says so."""
    if not nodes or (call := _call(0)) is None:
        return
    words = [0] * (max(nodes) // _BITS + 1)
    for node in nodes:
        words[node // _BITS] |= 1 << node % _BITS
    mask = (c_ulong * len(words))(*words)
    most = c_ulong(_BITS * len(words) + 1)
    call(c_void_p(address), c_ulong(nbytes), _INTERLEAVE, byref(mask), most, 0)


def policy_of(address: int | None) -> str | None:
    """Return the policy of the memory at an address, or of the process; None where the system does
    not tell."""
    if (call := _call(1)) is None:
        return None
    number = c_int()
    flags = 0 if address is None else _OF_ADDRESS
    failed = call(byref(number), None, c_ulong(0), c_void_p(address), flags)
    return POLICIES[number.value] if not failed and number.value < len(POLICIES) else None


def _call(which: int):
    numbers = _CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if numbers is None:
        return None
    syscall = CDLL(None, use_errno=True).syscall
    return lambda *operands: syscall(numbers[which], *operands)
