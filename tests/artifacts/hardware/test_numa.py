"""Memory over several nodes: what the system says of them, and the calls themselves, which take one
node as well."""

import mmap
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from artifacts.hardware.numa import interleave, nodes_with_memory, policy_of
from runtime.model.huge_pages import HUGE_PAGE


@pytest.mark.parametrize(
    "having, allowed, nodes",
    [
        ("0", "0", (0,)),
        ("0-1", "0-1", (0, 1)),
        ("0,2-3", "0-63", (0, 2, 3)),
        ("0-7", "1", (1,)),
        ("0-7", None, ()),
        (None, "0", ()),
    ],
)
def test_nodes_are_those_with_memory_that_the_process_may_use(
    tmp_path: Path, having: str | None, allowed: str | None, nodes: tuple[int, ...]
) -> None:
    if having is not None:
        folder = tmp_path / "sys/devices/system/node"
        folder.mkdir(parents=True)
        (folder / "has_memory").write_text(f"{having}\n")
    status = tmp_path / "proc/self"
    status.mkdir(parents=True)
    told = "" if allowed is None else f"Mems_allowed:\tff\nMems_allowed_list:\t{allowed}\n"
    (status / "status").write_text(f"Name:\tmoectl\n{told}")
    assert nodes_with_memory(tmp_path) == nodes


def test_memory_that_is_spread_says_so() -> None:
    nodes = nodes_with_memory()
    if not nodes or policy_of(None) is None:
        pytest.skip("this system tells nothing of nodes")
    memory = mmap.mmap(-1, HUGE_PAGE)
    address = addressof(c_char.from_buffer(memory))
    assert policy_of(address) == policy_of(None)
    interleave(address, HUGE_PAGE, ())
    assert policy_of(address) == policy_of(None)
    interleave(address, HUGE_PAGE, nodes)
    assert policy_of(address) == "interleave"
    memory[HUGE_PAGE - 1] = 7
