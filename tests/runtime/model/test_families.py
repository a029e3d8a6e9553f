"""Every family of transformers whose experts go through its experts interface: opened in both
layouts, computed to the bit, or refused in one line that says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from artifacts.errors import BadInput
from runtime.model.families import REFUSED
from runtime.model.open import open_model
from runtime.model.skeleton import auto_class
from runtime.session.session import Session, Settings
from tools.make.families import FAMILIES, tiny

pytestmark = pytest.mark.slow

IDS = torch.arange(5, 17)[None]
PRESETS = ("on-demand", "near", "horizon")


def save(model: PreTrainedModel, path: Path, *, as_published: bool) -> Path:
    """A checkpoint in bfloat16, with the names and shapes as published or as the module has
    them."""
    logging.disable_progress_bar()
    model.config.dtype = torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(path, save_original_format=as_published)
    return path


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of a prompt and of two tokens after it."""
    out = model(input_ids=IDS, use_cache=True)
    steps = [out.logits]
    for token in (7, 9):
        out = model(
            input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
        )
        steps.append(out.logits)
    return torch.cat(steps, dim=1)


def reference(folder: Path, model: PreTrainedModel) -> torch.Tensor:
    """The logits of transformers' own model."""
    plain = auto_class(model.config).from_pretrained(folder, experts_implementation="eager").eval()
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()  # mapped files are not aligned, and round otherwise
    return logits(plain)


def offloaded(folder: Path, presets: tuple[str, ...]) -> Iterator[torch.Tensor]:
    opened = open_model(str(folder))
    for preset in presets:
        with Session(opened, Settings(preset=preset, budget="30%")):
            yield logits(opened.model)
    opened.store.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = tiny(family)
    published = save(model, tmp_path / "published", as_published=True)
    expected = reference(published, model)
    assert expected.isfinite().all() and expected.unique().numel() > IDS.numel()
    for preset, ours in zip(PRESETS, offloaded(published, PRESETS), strict=True):
        assert torch.equal(ours, expected), preset
    fused = save(model, tmp_path / "fused", as_published=False)
    assert all(torch.equal(ours, expected) for ours in offloaded(fused, PRESETS[:1]))


# published transposed, and with rows in pairs
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "inkling_text"])
def test_experts_that_are_stored_otherwise_are_read_in_parts(tmp_path: Path, family: str) -> None:
    model = tiny(family)
    opened = open_model(str(save(model, tmp_path, as_published=True)))
    layer = opened.layers[0]
    inner, down = opened.store.layout.parts
    whole, part = (torch.zeros(opened.store.layout.nbytes, dtype=torch.uint8) for _ in range(2))
    opened.store.read(0, 3, whole)
    for name, view in opened.store.layout.views(whole).items():
        assert torch.equal(view, model.get_parameter(f"{layer.name}.{name}")[3])
    row = inner.nbytes // inner.shape[0]
    spans = ((inner.offset + 2 * row, inner.offset + 5 * row), (down.offset + 8, down.offset + 24))
    opened.store.read(0, 3, part, spans=spans)
    for start, stop in spans:
        assert torch.equal(part[start:stop], whole[start:stop]) and part[start:stop].any()
        part[start:stop] = 0
    assert not part.any()


def test_of_a_multimodal_model_only_the_language_model_is_loaded(tmp_path: Path) -> None:
    opened = open_model(str(save(tiny("kimi_k25"), tmp_path, as_published=True)))
    assert {name.split(".")[1] for name, _ in opened.model.named_parameters()} == {"language_model"}
    line = "kimi_k25 is opened for text: its weights for other input are not loaded"
    with Session(opened, Settings(budget="30%")) as session:
        assert line in session.receipt()["fallbacks"]


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_opened_is_refused(tmp_path: Path, family: str) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    for config in (
        f'{{"model_type": "{family}"}}',
        f'{{"model_type": "any", "text_config": {{"model_type": "{family}"}}}}',
    ):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(BadInput, match=f"^{family} cannot be opened: {REFUSED[family]}$"):
            open_model(str(tmp_path))


def test_every_family_of_transformers_is_opened_or_refused() -> None:
    modules = {
        path.parent.name
        for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    }
    with_experts = {name for name in modules if _has_experts(name)}
    generating = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    families = {
        name for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) in with_experts
    }
    assert len(with_experts) == 64
    assert families & generating <= FAMILIES.keys() | REFUSED.keys()
    assert FAMILIES.keys().isdisjoint(REFUSED)


def _has_experts(module: str) -> bool:
    path = Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py"
    return path.is_file() and "use_experts_implementation" in path.read_text(encoding="utf-8")
