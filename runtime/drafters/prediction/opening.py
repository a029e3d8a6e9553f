"""Opens the layer of a checkpoint that predicts a further token, as a model of one layer of the same
family."""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne

from artifacts.errors import BadInput, Incompatible
from runtime.drafters.prediction.layer import (
    Fusion,
    FusionOfStreams,
    PredictionLayer,
    PredictionLayerOfStreams,
)
from runtime.drafters.prediction.namings import NAMINGS, SHARED, Naming
from runtime.model.files.source import Source
from runtime.model.open import MoeModel
from runtime.model.quantised.quantised_tensor import Tensors
from runtime.model.skeleton import build_skeleton, load_resident

_LAYER = re.compile(r"(.*?)(?:layers|blk)\.(\d+)\.(.*)")
_EXPERTS = re.compile(r"(\bexperts\b|_exps\b).*")
_NO_LISTS_OF_LAYERS = re.compile(r"architectures$|_ids?$")


def open_layer(opened: MoeModel) -> PredictionLayer:
    """Open the first layer that predicts a further token: its weights are read into the model's
    dtype, its experts too. Embedding and head are the model's.

    Raises Incompatible for a checkpoint without such a layer, BadInput for one that is damaged or
    that the family's own layer cannot be.
    """
    config = opened.config.get_text_config()
    checkpoint = opened.source.open()
    tensors = opened.source.tensors(checkpoint, opened.source.read_config())
    name, stem = _found(tensors, config.num_hidden_layers, config.model_type)
    naming = NAMINGS[name]
    own = {key.removeprefix(stem): one for key, one in tensors.items() if key.startswith(stem)}
    own = {key: one for key, one in own.items() if not key.startswith(SHARED)}
    sides = {key: own.pop(f"{key}.weight", None) for key in _sides(naming)}
    if lacking := [key for key, one in sides.items() if one is None]:
        raise BadInput(f"{stem}{lacking[0]}.weight is missing from the checkpoint")
    block = _block(own, naming)
    others = [key for key in tensors if not key.startswith(stem + naming.block)]
    root, like = _most_like(others, block, config.num_hidden_layers)
    is_sparse = any(map(_EXPERTS.search, block))
    skeleton = build_skeleton(
        _config_of_one(config, like, naming.fields, is_sparse=is_sparse), opened.dtype
    )
    skeleton.set_input_embeddings(None)
    skeleton.set_output_embeddings(None)
    root = root if config is opened.config else "model."
    load_resident(
        skeleton,
        (),
        _renamed(own, naming, root) | _shared_end(tensors, naming, root),
        dtype=opened.dtype,
        device=opened.model.device,
        source=opened.source,
    )
    decoder = skeleton.get_decoder()
    fusion = _fusion(naming, sides, decoder, _offset(opened.source, skeleton))
    checkpoint.check_unchanged()
    kind = PredictionLayerOfStreams if len(naming.project) > 1 else PredictionLayer
    return kind(name, decoder, fusion.to(opened.model.device, opened.dtype), opened.model)


def _found(tensors: Tensors, depth: int, family: str) -> tuple[str, str]:
    for name, naming in NAMINGS.items():
        if (stem := naming.stem_in(tensors, depth)) is not None:
            return name, stem
    raise Incompatible(
        f"this checkpoint of {family} has no layers that predict further tokens (MTP) under a name "
        "that moectl knows: choose another drafter, as --draft ngram"
    )


def _sides(naming: Naming) -> tuple[str, ...]:
    return (naming.embed_norm, naming.hidden_norm, *naming.project)


def _block(own: Tensors, naming: Naming) -> list[str]:
    """Return the names of the decoder layer's tensors, within it."""
    names = (name for name in own if not name.startswith(tuple(naming.ends)))
    return [name.removeprefix(naming.block) for name in names if name.startswith(naming.block)]


def _most_like(names: Iterable[str], block: Iterable[str], depth: int) -> tuple[str, int]:
    """Return the prefix of the names of the model's layers, and which layer has most names in
    common with this one: it has the same kinds of attention and of experts."""
    layers: dict[tuple[str, int], set[str]] = {}
    for found in filter(None, map(_LAYER.fullmatch, names)):
        if int(found[2]) < depth:
            layers.setdefault((found[1], int(found[2])), set()).add(_plain(found[3]))
    wanted = {_plain(name) for name in block}
    return min(reversed(layers), key=lambda place: len(layers[place] ^ wanted))


def _plain(name: str) -> str:
    """Return a name without what differs between ways to store experts."""
    return _EXPERTS.sub(r"\1", name)


def _config_of_one(
    config: PreTrainedConfig, like: int, fields: Mapping[str, object], *, is_sparse: bool
) -> PreTrainedConfig:
    """Return the config of a model of one layer like layer `like`."""
    stored = config.to_dict()
    depth = config.num_hidden_layers
    of_layers = {
        name: [value[like]]
        for name, value in stored.items()
        if isinstance(value, list) and len(value) == depth and not _NO_LISTS_OF_LAYERS.search(name)
    }
    own = {
        name: stored[f"mtp_{name}"][:1]
        for name in ("layer_types", "mlp_layer_types")
        if stored.get(f"mtp_{name}")
    }
    first_sparse = 0 if is_sparse else 1
    kinds = {
        "decoder_sparse_step": 1,
        "first_k_dense_replace": first_sparse,
        "full_attention_interval": 1,
        "mlp_only_layers": [] if is_sparse else [0],
        "moe_layer_end_index": 0,
        "moe_layer_interval": 1,
        "moe_layer_start_index": first_sparse,
        "ple_layer_ids": [],
    }
    changes = of_layers | kinds | dict(fields) | own
    known = {name: value for name, value in changes.items() if name in stored}
    one = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return type(config).from_dict(stored | known | one)


def _renamed(own: Tensors, naming: Naming, root: str) -> Tensors:
    """Return the tensors of layer and end by the names of a model of one layer; others of the same
    stem are the model's."""
    renamed = {}
    for name, tensor in own.items():
        end = next((one for one in naming.ends if name.startswith(one)), None)
        if end is not None:
            renamed[root + naming.ends[end] + name.removeprefix(end)] = tensor
        elif name.startswith(naming.block):
            renamed[root + naming.layer + name.removeprefix(naming.block)] = tensor
    return renamed


def _shared_end(tensors: Tensors, naming: Naming, root: str) -> Tensors:
    """Return the model's own end where the layer has none."""
    name = f"{root}norm.weight"
    return {} if naming.ends or name not in tensors else {name: tensors[name]}


def _fusion(naming: Naming, sides: Tensors, decoder: PreTrainedModel, offset: float) -> Fusion:
    read = {name: tensor[...] for name, tensor in sides.items()}
    norms = [_norm(decoder, read[name] - offset) for name in _sides(naming)[:2]]
    kind = FusionOfStreams if len(naming.project) > 1 else Fusion
    project = [_linear(read[name]) for name in naming.project]
    return kind(*norms, project, is_hidden_first=naming.is_hidden_first)


def _norm(decoder: PreTrainedModel, weight: torch.Tensor) -> nn.Module:
    """Return a norm of the family, with this weight."""
    like = getattr(decoder, "norm", None) or decoder.layers[0].self_attn.q_norm
    norm = deepcopy(like)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _offset(source: Source, skeleton: PreTrainedModel) -> float:
    """Return what a file adds to the weights of norms, as GGUF files of some families do."""
    return float(
        any(
            isinstance(rule, WeightConverter)
            and "output_norm.weight" in "".join(rule.source_patterns)
            and isinstance(rule.operations[0], SubtractOne)
            for rule in source.mapping(skeleton)
        )
    )
