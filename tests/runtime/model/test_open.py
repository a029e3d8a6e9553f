"""The opened model equals the plain model in every tensor and expert, for every family and
layout."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from artifacts.errors import BadInput
from runtime.model.layout import aligned
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, LAYOUTS, VOCABULARY, save

CASES = [(family, layout, "float32") for family in FAMILIES for layout in LAYOUTS]
CASES += [(family, "hub", "bfloat16") for family in ("olmoe", "gpt_oss")]


@pytest.mark.parametrize(("family", "layout", "dtype"), CASES)
def test_everything_equals_the_plain_model(
    checkpoint: Checkpoint, family: str, layout: str, dtype: str
) -> None:
    folder = checkpoint(family, layout, dtype)
    opened = open_model(str(folder))
    plain = _plain(folder)
    assert opened.family == family
    assert all(
        parameter.is_meta for layer in opened.layers for parameter in layer.experts.parameters()
    )
    _assert_rest_equal(opened, plain)
    _assert_experts_equal(opened, plain)
    assert opened.model.generation_config.to_dict() == plain.generation_config.to_dict()
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    _fill_experts(opened)
    assert torch.equal(_logits(opened.model, tokens), _logits(plain, tokens))


def test_layers_count_moe_layers_only(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("qwen3_moe")))
    assert [(layer.index, layer.name) for layer in opened.layers] == [
        (0, "model.layers.0.mlp.experts"),
        (1, "model.layers.2.mlp.experts"),
    ]
    assert (opened.shape.num_layers, opened.shape.num_experts, opened.shape.top_k) == (2, 8, 2)


def test_gate_gives_logits_weights_and_selection(checkpoint: Checkpoint) -> None:
    for family in FAMILIES:
        opened = open_model(str(checkpoint(family)))
        logits, weights, selected = opened.layers[1].gate(torch.randn(5, 32))
        assert logits.shape == (5, opened.shape.num_experts), family
        assert weights.shape == selected.shape == (5, opened.shape.top_k), family


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_equal_a_single_file(checkpoint: Checkpoint, tmp_path: Path, layout: str) -> None:
    whole = checkpoint("olmoe", layout)
    sharded = save("olmoe", layout, tmp_path, shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    opened = open_model(str(sharded))
    _assert_rest_equal(opened, _plain(whole))
    _assert_experts_equal(opened, _plain(whole))


@pytest.mark.parametrize(
    ("stored", "run"), [("float32", torch.bfloat16), ("bfloat16", torch.float32)]
)
def test_dtypes_are_converted_as_in_transformers(
    checkpoint: Checkpoint, stored: str, run: torch.dtype
) -> None:
    folder = checkpoint("olmoe", "hub", stored)
    opened = open_model(str(folder), dtype=run)
    plain = _plain(folder, run)
    assert opened.config.dtype == opened.store.layout.dtype == run
    _assert_rest_equal(opened, plain)
    _assert_experts_equal(opened, plain)


def test_tied_embeddings_are_one_tensor(checkpoint: Checkpoint) -> None:
    model = open_model(str(checkpoint("qwen2_moe"))).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_resident_tensors_are_aligned_to_64_bytes(checkpoint: Checkpoint) -> None:
    model = open_model(str(checkpoint("phimoe"))).model
    assert all(
        parameter.data_ptr() % 64 == 0 for parameter in model.parameters() if not parameter.is_meta
    )


def test_no_shard_is_memory_mapped(checkpoint: Checkpoint) -> None:
    folder = checkpoint("mixtral")
    opened = open_model(str(folder))
    opened.store.read(0, 0, aligned(opened.store.layout.nbytes))
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_the_fingerprint_depends_on_the_model_not_the_folder(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    original = open_model(str(checkpoint("olmoe"))).fingerprint
    moved = shutil.copytree(checkpoint("olmoe"), tmp_path / "elsewhere")
    _edit_config(moved, transformers_version="9.9")
    assert open_model(str(moved)).fingerprint == original
    _edit_config(moved, rms_norm_eps=1e-3)
    assert open_model(str(moved)).fingerprint != original
    assert open_model(str(checkpoint("olmoe", "fused"))).fingerprint != original


def test_hub_id_opens_from_the_cache(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = tmp_path / "models--some-org--olmoe" / "refs" / "main"
    revision.parent.mkdir(parents=True)
    revision.write_text("0" * 40)
    shutil.copytree(checkpoint("olmoe"), revision.parents[1] / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert (
        open_model("some-org/olmoe").fingerprint == open_model(str(checkpoint("olmoe"))).fingerprint
    )


@pytest.mark.parametrize("window", [-1, 0, 1])
def test_windows_that_transformers_misreads_are_refused(
    window: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """With 1 its cache keeps all tokens; no mask is right then."""
    shutil.copytree(checkpoint("mixtral"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    with pytest.raises(BadInput, match=f"sliding_window {window}.*2 tokens or more: give null"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 2}))
    open_model(str(tmp_path)).store.close()


def test_opening_draws_no_random_numbers(checkpoint: Checkpoint) -> None:
    folder = checkpoint("olmoe")
    before = torch.get_rng_state()
    open_model(str(folder))
    assert torch.equal(torch.get_rng_state(), before)


def _plain(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load the stock model and copy its tensors out of the mapped file: alignment changes how
    kernels round."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model


def _assert_rest_equal(opened: MoeModel, plain: PreTrainedModel) -> None:
    experts = {
        f"{layer.name}.{part.name}" for layer in opened.layers for part in opened.store.layout.parts
    }
    tensors = dict([*opened.model.named_parameters(), *opened.model.named_buffers()])
    for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
        ours = tensors.pop(name)
        assert name in experts or (ours.dtype == tensor.dtype and torch.equal(ours, tensor)), name
    assert not tensors


def _assert_experts_equal(opened: MoeModel, plain: PreTrainedModel) -> None:
    buffer = aligned(opened.store.layout.nbytes)
    for layer in opened.layers:
        for expert in range(opened.shape.num_experts):
            opened.store.read(layer.index, expert, buffer)
            for name, values in opened.store.layout.views(buffer).items():
                expected = plain.get_parameter(f"{layer.name}.{name}")[expert]
                assert values.dtype == expected.dtype, (layer.name, expert, name)
                assert torch.equal(values, expected), (layer.name, expert, name)


def _fill_experts(opened: MoeModel) -> None:
    for layer in opened.layers:
        for name, parameter in list(layer.experts.named_parameters()):
            experts = [
                _expert(opened, layer.index, expert)[name]
                for expert in range(opened.shape.num_experts)
            ]
            assert torch.stack(experts).shape == parameter.shape
            setattr(
                layer.experts, name, torch.nn.Parameter(torch.stack(experts), requires_grad=False)
            )


def _expert(opened: MoeModel, layer: int, expert: int) -> dict[str, torch.Tensor]:
    buffer = aligned(opened.store.layout.nbytes)
    opened.store.read(layer, expert, buffer)
    return opened.store.layout.views(buffer)


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logits


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
