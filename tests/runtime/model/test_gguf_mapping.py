"""GGUF files as llama.cpp reads them: gpt-oss, whose gate and up take turns, ernie4_5-moe, positions scaled by YaRN."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from profilers.compare.llama_cpp import LlamaCpp
from profilers.compare.quality import compare, read
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.helpers.gguf_files import IN_MXFP4, SIZES, Types, every, scale_positions, write

IDS = torch.arange(3, 20)[None]
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
WITNESSED = {  # llama.cpp rounds activations to 8 bits where it multiplies by packed experts
    "gpt-oss": ("gpt_oss", every("F32", {"exps": "MXFP4"}), lambda writer: None, 5e-3),
    "ernie4_5-moe": ("ernie4_5_moe", every("F32"), lambda writer: None, 1e-4),
    "YaRN": ("qwen3_moe", every("F32"), lambda writer: scale_positions(writer, YARN), 1e-4),
}


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed (extra: peers)")
@pytest.mark.parametrize(("family", "types", "describe", "most"), WITNESSED.values(), ids=WITNESSED)
def test_llama_cpp_reads_the_same(tmp_path: Path, family: str, types: Types, describe: Callable, most: float) -> None:
    path, text = write(family, tmp_path / "model.gguf", types, describe=describe), [IDS[0].numpy()]
    with Session(open_model(str(path), dtype=torch.float32), Settings("full")) as session:
        ours = read(session, text, prefill=12)
    llama = LlamaCpp(path, threads=1, num_tokens=len(text[0]), vocab_size=SIZES["vocab_size"])
    assert compare(llama.read(text, prefill=12), ours).kl < most


def test_experts_of_gpt_oss_are_fused(tmp_path: Path) -> None:
    opened = open_model(str(write("gpt_oss", tmp_path / "model.gguf", IN_MXFP4)), dtype=torch.float32)
    logits = []
    for how in ("exact", "fused"):
        with Session(opened, Settings(preset="on-demand", experts=how)) as session, torch.inference_mode():
            session.new_requests(1)
            past = session.forward(IDS).past_key_values
            logits.append(session.forward(IDS[:, :1], past=past).logits)
            assert session.receipt()["experts_of_a_token"] == ("torch" if how == "exact" else "fused")
    exact, fused = logits
    assert 0 < (fused - exact).abs().max() <= 1e-4 * exact.abs().max()


def _linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)


def _weighted(writer: gguf.GGUFWriter) -> None:
    scale_positions(writer, YARN)
    writer.add_rope_scaling_yarn_log_mul(0.1)


@pytest.mark.parametrize(("describe", "told"), [(_linear, "linear"), (_weighted, "yarn, rope.scaling.yarn_log_mult")])
def test_positions_that_are_scaled_otherwise_are_refused(tmp_path: Path, describe: Callable, told: str) -> None:
    path = write("qwen3_moe", tmp_path / "model.gguf", every("Q8_0"), describe=describe)
    with pytest.raises(BadInput, match=f"scales its positions by {told}"):
        open_model(str(path))


def _join(arrays: dict[str, np.ndarray]) -> None:
    arrays["blk.0.ffn_gate_up_exps.weight"] = arrays.pop("blk.0.ffn_up_exps.weight")


@pytest.mark.parametrize(
    ("types", "change", "told"),
    [
        (every("F16"), lambda arrays: None, "ffn_gate_exps.weight is F16; of gpt_oss moectl reads packed experts"),
        (IN_MXFP4, _join, "ffn_gate_up_exps.weight is MXFP4; .* with gate and up apart"),
        (
            every("Q8_0", {"up_exps": "Q4_0"}),
            lambda arrays: None,
            "ffn_up_exps.weight is of another type than its other half",
        ),
    ],
)
def test_experts_of_gpt_oss_that_cannot_take_turns_are_refused(
    tmp_path: Path, types: Types, change: Callable, told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        open_model(str(write("gpt_oss", tmp_path / "model.gguf", types, change=change)))
