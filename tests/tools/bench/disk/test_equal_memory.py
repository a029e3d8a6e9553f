"""Programs with equal memory: what one of them reports, and the limit that they are given."""

import os
import sys
from pathlib import Path

import pytest

from artifacts.errors import BadInput
from profilers.export.gguf import export_gguf
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.profilers.export.test_export_gguf import SIZES, opened
from tools.bench.disk.memory_limit import run_limited
from tools.bench.disk.way import LLAMA_CPP, OURS, Way, measure_twice

TOUCHING = "import sys; held = bytearray(b'x') * (int(sys.argv[1]) << 20); print(len(held))"


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("olmoe", "fused")


@pytest.mark.parametrize("link", ["disk", "direct"])
def test_moectl_reports_its_times(folder: Path, link: str) -> None:
    way = Way(OURS, "4x", link, "fused")
    found = measure_twice(way, folder, open_model(str(folder)).config.vocab_size, tokens=2)
    assert found.first_s > found.token_s > 0 and found.read_nbytes >= 0


def test_so_does_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip(
        "xllamacpp", reason="llama.cpp is not installed: pip install 'moectl[peers]'"
    )
    file = tmp_path / "model.gguf"
    export_gguf(opened("olmoe", tmp_path / "model"), tmp_path / "model", file, "q8_0")
    found = measure_twice(Way(LLAMA_CPP), file, SIZES["vocab_size"], tokens=2)
    assert found.first_s > 0 and found.token_s > 0


def run(mib: int, limit: int) -> tuple[str, int]:
    return run_limited(
        [sys.executable, "-c", TOUCHING, str(mib)], limit << 20, environment=dict(os.environ)
    )


def test_a_command_has_only_so_much_memory() -> None:
    try:
        output, peak_nbytes = run(32, 256)
    except BadInput as problem:
        pytest.skip(str(problem))
    assert int(output) == 32 << 20 and 32 << 20 <= peak_nbytes <= 256 << 20
    with pytest.raises(BadInput, match=r"failed within 0\.1 GiB"):
        run(1024, 96)
