"""Memory in huge pages, and what the system says of it."""

from pathlib import Path

import pytest
import torch

from runtime.model import huge_pages
from runtime.model.huge_pages import HUGE_PAGE, anonymous, mode, shares

GIVES_THEM = pytest.mark.skipif(
    mode() not in ("always", "madvise"), reason="the system gives no huge pages"
)

SMAPS = """
00400000-00800000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                4000 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me ac hg
7f0000000000-7f0000200000 r--s 00000000 fe:00 11 /a file 12-34
Rss:                   0 kB
AnonHugePages:         0 kB
7f0000200000-7f0000600000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:      4096 kB
"""


class Tensor:
    """Stands at an address without memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.data_ptr = lambda: address


@pytest.mark.parametrize("nbytes", [1, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 5])
def test_memory_is_zeros_of_the_size_and_can_be_written(nbytes: int) -> None:
    memory = anonymous(nbytes)
    assert memory.shape == (nbytes,) and memory.untyped_storage().nbytes() == nbytes
    assert not memory.any() and memory.fill_(7).min() == 7


@GIVES_THEM
def test_all_that_fills_huge_pages_is_on_their_borders_and_the_rest_is_not_held() -> None:
    memory = anonymous(2 * HUGE_PAGE + 5)
    first = memory.data_ptr()
    whole = {"whole": [memory[: 2 * HUGE_PAGE]]}
    assert first % HUGE_PAGE == 0 and shares(whole) == {"whole": None}
    memory.fill_(1)
    (held,) = [one for one in huge_pages._read_mappings() if one.start <= first < one.stop]
    assert held.stop == first + 2 * HUGE_PAGE and 0 <= shares(whole)["whole"] <= 1


@GIVES_THEM
def test_memory_is_returned_with_its_last_view() -> None:
    memory = anonymous(HUGE_PAGE)
    view = memory[5:9].fill_(1)
    address = memory.data_ptr()
    del memory
    assert view.tolist() == [1] * 4 and _is_mapped(address)
    del view
    assert not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    """Whether a mapping with huge pages or room for them is resident there."""
    held = [one for one in huge_pages._read_mappings() if one.start <= address < one.stop]
    return bool(held) and held[0].resident_kib > 0


def test_shares_are_of_the_resident_memory_of_the_mappings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "_MAPPINGS", tmp_path / "smaps")
    memory = {
        "half": [Tensor(0x400040, 64)],
        "file": [Tensor(0x7F0000000000, 64)],
        "both": [
            Tensor(0x400000, 1 << 20),
            Tensor(0x500000, 1 << 20),
            Tensor(0x7F0000200000, 2 << 20),
        ],
        "across": [Tensor(0x7F0000100000, 2 << 20)],
        "nowhere": [Tensor(0x900000, 64)],
    }
    assert shares(memory) == dict.fromkeys(memory)  # where the system says nothing
    (tmp_path / "smaps").write_text(SMAPS.lstrip())
    assert shares(memory) == {
        "half": 0.512,
        "file": None,
        "both": 0.756,
        "across": 1.0,
        "nowhere": None,
    }


@pytest.mark.parametrize(
    ("says", "expected"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]", "never"), (None, "none")],
)
def test_the_mode_is_what_the_system_says(
    says: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "_MODE", tmp_path / "enabled")
    if says is not None:
        (tmp_path / "enabled").write_text(says)
    assert mode() == expected


def test_without_the_systems_request_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_IS_OFFERED", False)
    memory = anonymous(HUGE_PAGE + 1)
    assert memory.shape == (HUGE_PAGE + 1,) and memory.fill_(3).max() == 3
    assert torch.equal(memory[:4], torch.full((4,), 3, dtype=torch.uint8))
