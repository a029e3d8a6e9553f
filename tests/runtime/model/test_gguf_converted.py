"""GGUF files that llama.cpp's converter wrote, of each architecture: their logits are those of
transformers with the same numbers, and llama.cpp gives the same."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from profilers.compare.llama_cpp import LlamaCpp
from profilers.compare.quality import compare, read
from runtime.model.gguf.shape import gguf_shape
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from runtime.session.settings import EXACT, FUSED
from tests.helpers.converted import NAMES, in_few_bits, unpacked
from tools.make.converted import CONVERTED, TOKENS, model_of

pytestmark = pytest.mark.slow

NUM_TOKENS = {"deepseek4": 150}  # of the prompt: more than the 128 that are compressed into one
TYPES = ("Q8_0", "Q4_0", "MXFP4", "Q5_1", "Q4_1")
MULTIPLIED = ("Q8_0", "Q4_0", "MXFP4", "Q8_0")
CACHED = 5  # tokens, fewer than a window
KINDS = ("keys", "values", "indexer_keys", "idx_keys")
NOT_IN_LLAMA_CPP: dict[str, str] = {}
"""Architectures that the wheel does not open, with its reason."""


def _ids(name: str) -> torch.Tensor:
    return torch.arange(3, 3 + NUM_TOKENS.get(name, 17))[None]


def _logits(path: Path, ids: torch.Tensor, experts: str = EXACT) -> torch.Tensor:
    """Return the logits of a prompt and of two tokens after it, [T, V]."""
    opened = open_model(str(path), dtype=torch.float32)
    settings = Settings(preset="on-demand", experts=experts)
    with Session(opened, settings) as session, torch.inference_mode():
        assert session.receipt()["experts_of_a_token"] == ("torch" if experts == EXACT else "fused")
        session.new_requests(1)
        output = session.forward(ids[:, :-2])
        logits = [output.logits[0]]
        for token in ids[0, -2:]:
            output = session.forward(token.view(1, 1), past=output.past_key_values)
            logits.append(output.logits[0])
    return torch.cat(logits)


def test_every_model_has_its_file() -> None:
    assert sorted(CONVERTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    with torch.inference_mode():
        expected = model_of(name)(_ids(name)).logits[0]
    found = _logits(unpacked(name, tmp_path), _ids(name))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_bytes_of_the_model(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    _, memory = gguf_shape(unpacked(name, tmp_path))
    text = {id(each) for part in (model.get_decoder(), model.lm_head) for each in part.parameters()}
    sizes = [
        each.nbytes
        for key, each in model.named_parameters()
        if id(each) in text and ".experts." not in key
    ]
    assert memory.stored_nbytes == pytest.approx(sum(sizes), rel=0.005)
    with torch.inference_mode():
        count = 128 if name == "deepseek4" else CACHED
        cache = model(_ids("deepseek4")[:, :count]).past_key_values
    if name == "deepseek4":  # beside a window, which does not grow
        compressed = [getattr(layer, "compressed_kv", {}).values() for layer in cache.layers]
        kept = [each for layer in compressed for each in layer]
    else:
        kept = [getattr(layer, kind, None) for layer in cache.layers for kind in KINDS]
    assert memory.cache_nbytes * count == sum(each.nbytes for each in kept if each is not None)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_in_few_bits_is_the_one_of_its_numbers(tmp_path: Path, name: str) -> None:
    packed, plain = in_few_bits(unpacked(name, tmp_path), TYPES)
    assert torch.equal(_logits(packed, _ids(name)), _logits(plain, _ids(name)))


@pytest.mark.parametrize("name", ["deepseek4", "gemma4", "minimax-m3", "nemotron_h_moe"])
def test_fused_experts_of_every_gate_give_the_same(tmp_path: Path, name: str) -> None:
    packed, _ = in_few_bits(unpacked(name, tmp_path), MULTIPLIED)
    exact = _logits(packed, _ids(name))
    fused = _logits(packed, _ids(name), experts=FUSED)
    assert (fused - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="llama.cpp is not installed (extra: peers)"
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_IN_LLAMA_CPP])
def test_llama_cpp_reads_the_same(tmp_path: Path, name: str) -> None:
    path = unpacked(name, tmp_path)
    text = [_ids(name)[0].numpy()]
    prefill = len(text[0]) - 5
    opened = open_model(str(path), dtype=torch.float32)
    with Session(opened, Settings("full")) as session:
        ours = read(session, text, prefill=prefill)
    llama = LlamaCpp(path, threads=1, num_tokens=len(text[0]), vocab_size=len(TOKENS))
    theirs = llama.read(text, prefill=prefill)
    assert compare(theirs, ours).kl < 1e-4
    assert torch.equal(theirs.logits.argmax(-1), ours.logits.argmax(-1))
