"""Peers give the same logits on the same text as the full model; the bytes that they hold are
counted."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import BadInput
from moectl.bundled import demo_model
from profilers.compare import llama_cpp, peers
from profilers.compare.bench import BenchText
from profilers.compare.peers import PEERS, PeerTask, read_apart, read_here
from profilers.compare.quality import TextReading, compare, read
from profilers.export.gguf import export_gguf
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings

pytestmark = pytest.mark.slow

TEXT = BenchText((np.arange(5, 21), np.arange(30, 46)), 8)
HAS_ACCELERATE = find_spec("accelerate") is not None
HAS_LLAMA_CPP = find_spec("xllamacpp") is not None


@pytest.fixture(scope="module")
def full(opened: MoeModel) -> TextReading:
    with Session(opened, Settings("full")) as session:
        return read(session, TEXT.sequences, prefill=TEXT.prefill)


def task(name: str, folder: Path, *, memory_nbytes: int = 0) -> PeerTask:
    return PeerTask(PEERS[name], folder, "cpu", 1, TEXT.sequences, TEXT.prefill, memory_nbytes)


@pytest.mark.parametrize(
    "name", ["transformers-eager", "transformers-batched", "transformers-grouped"]
)
def test_plain_transformers_finds_the_same(
    name: str, folder: Path, opened: MoeModel, full: TextReading
) -> None:
    found = read_here(task(name, folder))
    quality = compare(found.reading, full)
    assert quality.kl < 1e-6 and quality.top1_agreement == 1
    assert found.expert_nbytes == opened.shape.nbytes < found.memory_nbytes
    assert len(found.reading.decode_s) == TEXT.num_decoded and min(found.reading.decode_s) > 0


@pytest.mark.skipif(not HAS_ACCELERATE, reason="Accelerate is not installed (extra: peers)")
def test_accelerate_holds_what_it_may(folder: Path, opened: MoeModel, full: TextReading) -> None:
    others = sum(one.nbytes for one in opened.model.parameters() if one.device.type != "meta")
    limit = others + int(0.75 * opened.shape.nbytes)
    found = read_here(task("accelerate-disk", folder, memory_nbytes=limit))
    assert found.expert_nbytes < opened.shape.nbytes and 0 < found.memory_nbytes <= limit
    assert compare(found.reading, full).kl < 1e-6


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="llama.cpp is not installed (extra: peers)")
def test_llama_cpp_reads_the_same_text(tmp_path: Path) -> None:
    opened = open_model(str(demo_model()))
    with Session(opened, Settings("full")) as session:
        full = read(session, TEXT.sequences, prefill=TEXT.prefill)
    found = {}
    for type_ in ("bf16", "q4_0"):
        export_gguf(opened, demo_model(), tmp_path / f"{type_}.gguf", type_)
        found[type_] = read_here(task(f"llama.cpp-{type_}", tmp_path / f"{type_}.gguf"))
    assert (
        compare(found["bf16"].reading, full).kl < 1e-2 < compare(found["q4_0"].reading, full).kl < 1
    )
    assert (
        found["bf16"].expert_nbytes == opened.shape.nbytes
        and found["q4_0"].expert_nbytes == opened.shape.nbytes * 9 / 32
    )
    assert (
        len(found["bf16"].reading.decode_s) == TEXT.num_decoded
        and min(found["bf16"].reading.decode_s) > 0
    )


def test_what_cannot_run_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="needs a GPU"):
        read_apart(task("accelerate-cpu", folder))
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"moectl\[peers\]"):
        read_apart(task("accelerate-disk", folder))
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"xllamacpp.*moectl\[peers\]"):
        read_apart(task("llama.cpp-bf16", folder))
