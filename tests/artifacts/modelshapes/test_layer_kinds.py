"""What differs between layers, by a config: against real modules."""

from pathlib import Path

import pytest

from artifacts.modelshapes.known import MODELS, model_shape
from artifacts.modelshapes.memory import backbone_memory, backbone_of, from_config
from artifacts.modelshapes.published import CONFIGS
from tools.make.families import tiny

FAMILIES = (
    "deepseek_v4",
    "gemma4_text",
    "glm5_next",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_linear",
    "minimax_m3_vl_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
)


def test_tables_and_drafting_layers_are_counted_apart() -> None:
    """51 billion weights of n-grams; GLM-5.3-Flash has 320 billion with the layer that drafts."""
    assert CONFIGS.keys() <= MODELS.keys()
    flash = MODELS["qwen3.8-flash-next"]
    memory = backbone_memory(flash, backbone_of(flash.name))
    assert memory.tables_nbytes / 2e9 == pytest.approx(51.2, abs=0.1)
    assert memory.stored_nbytes > memory.weights_nbytes + memory.tables_nbytes
    glm = MODELS["glm-5.3-flash"]
    memory = backbone_memory(glm, backbone_of(glm.name))
    assert (memory.stored_nbytes + glm.shape.nbytes) / 2e9 == pytest.approx(320, rel=0.005)
    assert memory.drafting_nbytes / 2e9 == pytest.approx(7.4, abs=0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_module(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    memory = backbone_memory(shape, from_config(tmp_path / "config.json"))
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if ".visual." not in name
    }
    wide = {
        tensor.data_ptr(): tensor.numel()
        for name, tensor in tensors.items()
        if tensor.dim() > 1 and ".experts." not in name
    }
    counted = (memory.weights_nbytes + memory.tables_nbytes) / shape.dtype_nbytes
    assert counted == pytest.approx(sum(wide.values()), rel=0.01)
    routed = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    assert shape.shape.nbytes / shape.weight_nbytes == pytest.approx(routed, rel=0.005)
