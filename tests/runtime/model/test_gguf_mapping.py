"""GGUF files as llama.cpp reads them, and what of them is refused."""

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
from tests.helpers.gguf_entries import scale_positions
from tests.helpers.gguf_files import (
    BY_PROJECTION,
    IN_MXFP4,
    OF_FEW_BITS,
    OWN,
    SIZES,
    Types,
    every,
    write,
)

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 20)[None]
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def _nothing(writer: gguf.GGUFWriter) -> None:
    pass


def _weighted(writer: gguf.GGUFWriter) -> None:
    scale_positions(writer, YARN)
    writer.add_rope_scaling_yarn_log_mul(0.1 * 0.707)


def _ungrouped(writer: gguf.GGUFWriter) -> None:
    """Groups of V2 are those of its best expert, which llama.cpp does not know."""
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)


WITNESSED = {  # llama.cpp rounds activations to 8 bits where it multiplies by packed experts
    "deepseek2, sigmoids": ("deepseek_v3", every("F32"), _nothing, 1e-4),
    "deepseek2, YaRN": ("deepseek_v3", every("F32"), _weighted, 1e-4),
    "deepseek2, softmax": ("deepseek_v2", every("F32"), _ungrouped, 1e-4),
    "ernie4_5-moe": ("ernie4_5_moe", every("F32"), _nothing, 1e-4),
    "gpt-oss": ("gpt_oss", every("F32", {"exps": "MXFP4"}), _nothing, 5e-3),
    "granitemoe": ("granitemoe", every("F32"), _nothing, 1e-4),
    "granitemoe, shared": ("granitemoeshared", every("F32"), _nothing, 1e-4),
    "hunyuan-moe": ("hunyuan_v1_moe", every("F32"), _nothing, 1e-4),
    "lfm2moe": ("lfm2_moe", every("F32"), _nothing, 1e-4),
    "qwen35moe": ("qwen3_5_moe_text", every("F32"), _nothing, 1e-4),
    "types that differ": ("qwen3_moe", BY_PROJECTION, _nothing, 5e-3),
    "types of the newest files": ("qwen3_moe", OF_FEW_BITS, _nothing, 5e-3),
    "YaRN": ("qwen3_moe", every("F32"), lambda writer: scale_positions(writer, YARN), 1e-4),
}


@pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="llama.cpp is not installed (extra: peers)"
)
@pytest.mark.parametrize(("family", "types", "describe", "most"), WITNESSED.values(), ids=WITNESSED)
def test_llama_cpp_reads_the_same(
    tmp_path: Path, family: str, types: Types, describe: Callable, most: float
) -> None:
    path = write(family, tmp_path / "model.gguf", types, describe=describe)
    text = [IDS[0].numpy()]
    with Session(open_model(str(path), dtype=torch.float32), Settings("full")) as session:
        ours = read(session, text, prefill=12)
    llama = LlamaCpp(path, threads=1, num_tokens=len(text[0]), vocab_size=SIZES["vocab_size"])
    assert compare(llama.read(text, prefill=12), ours).kl < most


def test_experts_of_gpt_oss_are_fused(tmp_path: Path) -> None:
    opened = open_model(
        str(write("gpt_oss", tmp_path / "model.gguf", IN_MXFP4)), dtype=torch.float32
    )
    logits = []
    for how in ("exact", "fused"):
        with (
            Session(opened, Settings(preset="on-demand", experts=how)) as session,
            torch.inference_mode(),
        ):
            session.new_requests(1)
            past = session.forward(IDS).past_key_values
            logits.append(session.forward(IDS[:, :1], past=past).logits)
            assert session.receipt()["experts_of_a_token"] == (
                "torch" if how == "exact" else "fused"
            )
    exact, fused = logits
    assert 0 < (fused - exact).abs().max() <= 1e-4 * exact.abs().max()


def _older(writer: gguf.GGUFWriter) -> None:
    """Sizes of keys and values as files have them whose kv_b is whole."""
    for size in ("key_length_mla", "value_length_mla", "head_count_kv"):
        writer.kv_data[0].pop(f"deepseek2.attention.{size}")
    writer.add_key_length(64)
    writer.add_value_length(32)
    writer.add_head_count_kv(4)


def _whole(arrays: dict[str, np.ndarray]) -> None:
    for layer in ("blk.0", "blk.1"):
        keys, values = (arrays.pop(f"{layer}.attn_{part}_b.weight") for part in "kv")
        arrays[f"{layer}.attn_kv_b.weight"] = np.concatenate(
            [keys.swapaxes(1, 2), values], 1
        ).reshape(-1, 64)


@pytest.mark.parametrize("rank", [64, None])
def test_kv_b_may_be_whole_and_q_of_full_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    monkeypatch.setitem(OWN, "deepseek_v3", OWN["deepseek_v3"] | {"q_lora_rank": rank})
    ways = ({}, {"change": _whole, "describe": _older})
    paths = [
        write("deepseek_v3", tmp_path / f"{i}.gguf", every("F32"), **way)
        for i, way in enumerate(ways)
    ]
    logits = []
    for path in paths:
        with Session(open_model(str(path)), Settings("full")) as session, torch.inference_mode():
            logits.append(session.forward(IDS).logits)
    assert torch.equal(*logits)


def _linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)


def _warmer(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_temperature_length(8192)


def _placeless(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_finetuned(False)


def _unscaled(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0].pop("granitemoe.attention.scale")


def _normalised(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_weights_norm(True)


@pytest.mark.parametrize(
    ("family", "describe", "told"),
    [
        (
            "deepseek_v2",
            _normalised,
            "norm_topk_prob True, which transformers' deepseek_v2 does not follow",
        ),
        (
            "deepseek_v3",
            _warmer,
            "attention.temperature_length 8192, which deepseek_v3 does not compute",
        ),
        (
            "deepseek_v3",
            lambda writer: scale_positions(writer, YARN),
            "does not say rope.scaling.yarn_log_multiplier",
        ),
        (
            "granitemoe",
            _placeless,
            "rope.scaling.finetuned False, which granitemoeshared does not compute",
        ),
        ("granitemoe", _unscaled, "does not say attention.scale, which granitemoeshared needs"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    tmp_path: Path, family: str, describe: Callable, told: str
) -> None:
    path = write(family, tmp_path / "model.gguf", every("Q8_0"), describe=describe)
    with pytest.raises(BadInput, match=told):
        open_model(str(path))


@pytest.mark.parametrize(
    ("describe", "told"), [(_linear, "linear"), (_weighted, "yarn, rope.scaling.yarn_log_mult")]
)
def test_positions_that_are_scaled_otherwise_are_refused(
    tmp_path: Path, describe: Callable, told: str
) -> None:
    path = write("qwen3_moe", tmp_path / "model.gguf", every("Q8_0"), describe=describe)
    with pytest.raises(BadInput, match=f"scales its positions by {told}"):
        open_model(str(path))


def _join(arrays: dict[str, np.ndarray]) -> None:
    arrays["blk.0.ffn_gate_up_exps.weight"] = arrays.pop("blk.0.ffn_up_exps.weight")


@pytest.mark.parametrize(
    ("types", "change", "told"),
    [
        (
            every("F16"),
            lambda arrays: None,
            "ffn_gate_exps.weight is F16; of gpt_oss moectl reads packed experts",
        ),
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
