"""A transformers model without its routed experts: built on `meta`, the other tensors loaded as
transformers does."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.core_model_loading import (
    WeightConverter,
    WeightTransform,
    convert_and_load_state_dict_in_model,
)
from transformers.integrations.gguf.gguf_conversion_mapping import Cast
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo

from artifacts.errors import BadInput, first_line
from runtime.devices import is_host
from runtime.model.dense_memory import gather
from runtime.model.files.checkpoint import StoredTensor
from runtime.model.files.source import Source
from runtime.model.layers import MoeLayer
from runtime.model.layout import is_finite
from runtime.model.quantised.dense_bits import DenseQuantiser, DenseWidth

_SUPERFLUOUS = (
    r"(^|\.)mtp(_|\.)",
    r"(^|\.)(visual|vision\w*|audio\w*|image_newline|mm_projector|multi_modal_projector)\.",
    r"rotary_emb\.(original_)?inv_freq$",
    r"(^|\.)position_ids$",
)


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model in evaluation mode, every tensor on `meta`, experts dispatched eagerly; of a
    multimodal model only what a text uses."""
    try:
        with torch.device("meta"), init.no_tie_weights():
            model = auto_class(config).from_config(
                config, dtype=dtype, experts_implementation="eager", trust_remote_code=False
            )
    except Exception as error:  # it may come from any size in the config
        raise BadInput(
            f"transformers cannot build a language model from this config: {first_line(error)}"
        ) from error
    _keep_text_model(model)
    return model.eval().requires_grad_(False)


def auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]:
    """Return the class by which transformers opens a checkpoint with such a config: a whole
    multimodal model if there is one, since the names of its weights belong to that model."""
    is_multimodal = (
        config.get_text_config() is not config
        and type(config) in AutoModelForMultimodalLM._model_mapping
    )
    is_causal = not is_multimodal and type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM


def _keep_text_model(model: PreTrainedModel) -> None:
    """Drop the modules of a multimodal model that a text does not use, such as its vision tower;
    their weights in the checkpoint are then ignored."""
    if model.config.get_text_config() is model.config:
        return
    kept = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    names = tuple(_others(model, "", kept))
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, None)
    ignored = {f"^{re.escape(name)}\\." for name in names}
    model._keys_to_ignore_on_load_unexpected = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *ignored,
    }


def _others(module: nn.Module, prefix: str, kept: set[nn.Module | None]) -> Iterator[str]:
    """Yield the names of the largest modules with weights that are not in `kept`, and neither
    contain nor belong to one that is."""
    for name, child in module.named_children():
        if child in kept:
            continue
        if not kept.isdisjoint(child.modules()):
            yield from _others(child, f"{prefix}{name}.", kept)
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def load_resident(
    model: PreTrainedModel,
    layers: Sequence[MoeLayer],
    tensors: dict[str, StoredTensor],
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    source: Source,
    dense: int | None = None,
) -> DenseWidth | None:
    """Load `tensors` into `model` on `device`, all but the experts of `layers`, which stay on
    `meta`. Linear layers besides experts and routers are quantised to `dense` bits if that is
    given, which the result describes.

    Raises BadInput for the first parameter that is missing, of the wrong shape or not finite, and
    BadUsage for another width; none is initialised at random.
    """
    experts = {f"{layer.name}.{name}" for layer in layers for name in layer.shapes}
    quantiser = None if dense is None else DenseQuantiser(model, dense, layers)
    for name in experts:
        model.get_parameter(
            name
        )._is_hf_initialized = True  # or transformers would fill them with random numbers
    mapping = source.mapping(model)
    loading = LoadStateDictConfig(
        pretrained_model_name_or_path=str(source.path),
        device_map={"": torch.device(device)},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype) | _wide(mapping),
        weight_mapping=mapping,
    )
    with _no_progress_bar():
        info, _ = convert_and_load_state_dict_in_model(
            model, tensors, replace(loading, hf_quantizer=quantiser), None
        )
    info.missing_keys -= experts
    _check_loaded(model, info)
    model._finalize_model_loading(model, loading, info)
    model.requires_grad_(False)
    if quantiser:
        quantiser.finish()
    gather(model)
    _check_resident(model, experts)
    return quantiser and quantiser.width


def _wide(mapping: list[WeightTransform]) -> dict[str, torch.dtype]:
    """Return the parameters whose rules end in a cast, which are computed from numbers in
    float32."""
    rules = (
        rule
        for rule in mapping
        if isinstance(rule, WeightConverter) and isinstance(rule.operations[-1], Cast)
    )
    return {re.escape(rule.target_patterns[0]): torch.float32 for rule in rules}


def _check_loaded(model: PreTrainedModel, info: LoadStateDictInfo) -> None:
    for name, got, expected in sorted(info.mismatched_keys):
        raise BadInput(
            f"{name} has shape {list(got)} where the config asks for {list(expected)}: "
            "config and weights are not of the same model"
        )
    for name, error in info.conversion_errors.items():
        raise BadInput(
            f"{name} cannot be made from the stored tensors: {error.strip().splitlines()[-1]}"
        )
    for name in sorted(_really_unexpected(model, info.unexpected_keys)):
        raise BadInput(
            f"{name} in the checkpoint is nothing that transformers' {model.config.model_type} "
            "has: without it the output could be wrong, so such a checkpoint is not opened"
        )
    for name in sorted(_really_missing(model, info.missing_keys)):
        raise BadInput(f"{name} is missing from the checkpoint: download it again")


def _really_missing(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Return the missing names, except names tied to a loaded tensor and names that the family
    declares optional."""
    pairs = model.all_tied_weights_keys.items()
    tied = {name for pair in pairs for name in pair if not missing.issuperset(pair)}
    optional = "|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ())
    return {name for name in missing - tied if not (optional and re.search(optional, name))}


def _really_unexpected(model: PreTrainedModel, unexpected: set[str]) -> set[str]:
    """Return the unexpected names, except names that the family declares superfluous and names of
    parts that predict further tokens, see, hear or were once stored and are computed now."""
    patterns = [*_SUPERFLUOUS, *(model._keys_to_ignore_on_load_unexpected or ())]
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return {
        name
        for name in unexpected
        if not any(re.search(pattern, name) for pattern in patterns) and not _is_beyond(name, depth)
    }


def _is_beyond(name: str, depth: int | None) -> bool:
    """Return whether a tensor belongs to a layer behind the last, as DeepSeek, GLM and others store
    layers that predict further tokens."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return layer is not None and depth is not None and int(layer.group(1)) >= depth


def _check_resident(model: PreTrainedModel, experts: set[str]) -> None:
    for name, parameter in model.named_parameters():
        if name not in experts and not is_finite(parameter):
            raise BadInput(f"{name} holds NaN or infinity, the checkpoint is damaged")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.is_meta == (name in experts), f"{name} is on {tensor.device}"
        assert not is_host(tensor.device) or tensor.data_ptr() % 64 == 0 or tensor.dim() == 0, (
            f"{name} is not aligned"
        )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Turn off transformers' progress bar: the command line draws bars, not the library."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
