"""Opens the layer of a checkpoint that predicts a further token, as a model of one layer of the
same family."""

import re
from collections.abc import Iterable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne

from artifacts.errors import BadInput, BadUsage
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """The layer as it is stored: `own` has its tensors by their names behind the stem, without the
    fusion's, which are in `sides`. `root` begins the names of the model's layers, of which `like`
    is the most like it."""

    name: str
    own: Tensors
    sides: Tensors
    root: str
    like: int
    is_sparse: bool

    @property
    def naming(self) -> Naming:
        return NAMINGS[self.name]


def open_layer(opened: MoeModel) -> PredictionLayer:
    """Open the first layer that predicts a further token: its weights are read into the model's
    dtype, its experts too. Embedding and head are the model's.

    Raises BadUsage for a checkpoint without such a layer, BadInput for one that is damaged or
    that the family's own layer cannot be.
    """
    source = opened.source
    with closing(source.open()) as checkpoint:
        tensors = source.tensors(checkpoint, source.read_config())
        layer = _read(opened, tensors, _found(tensors, opened.config.get_text_config()))
        checkpoint.check_unchanged()
    return layer


def _found(tensors: Tensors, config: PreTrainedConfig) -> _Stored:
    depth = config.num_hidden_layers
    stems = ((name, naming.stem_in(tensors, depth)) for name, naming in NAMINGS.items())
    name, stem = next(((name, stem) for name, stem in stems if stem is not None), ("", ""))
    if not name:
        raise BadUsage(
            f"this checkpoint of {config.model_type} has no layers that predict further tokens "
            "(MTP) under a name that moectl knows: choose another drafter, as --draft ngram"
        )
    naming = NAMINGS[name]
    own = {key.removeprefix(stem): one for key, one in tensors.items() if key.startswith(stem)}
    own = {key: one for key, one in own.items() if not key.startswith(SHARED)}
    sides = {key: own.pop(f"{key}.weight", None) for key in _sides(naming)}
    if lacking := [key for key, one in sides.items() if one is None]:
        raise BadInput(f"{stem}{lacking[0]}.weight is missing from the checkpoint")
    block = _block(own, naming)
    others = (key for key in tensors if not key.startswith(stem + naming.block))
    root, like = _most_like(others, block, depth)
    return _Stored(name, own, sides, root, like, any(map(_EXPERTS.search, block)))


def _read(opened: MoeModel, tensors: Tensors, stored: _Stored) -> PredictionLayer:
    config = opened.config.get_text_config()
    skeleton = build_skeleton(_config_of_one(config, stored), opened.dtype)
    skeleton.set_input_embeddings(None)
    skeleton.set_output_embeddings(None)
    # the text part of a multimodal model stands alone here
    is_part = stored.root and config is not opened.config
    load_resident(
        skeleton,
        (),
        _renamed(tensors, stored, "model." if is_part else stored.root),
        dtype=opened.dtype,
        device=opened.model.device,
        source=opened.source,
    )
    decoder = skeleton.get_decoder()
    fusion = _fusion(stored, decoder, _offset(opened.source, skeleton))
    fusion.to(opened.model.device, opened.dtype)
    if isinstance(fusion, FusionOfStreams):
        # the model then gives the streams, not what is mixed from them
        config.tie_last_hidden_states = False
        return PredictionLayerOfStreams(stored.name, decoder, fusion, opened.model)
    return PredictionLayer(stored.name, decoder, fusion, opened.model)


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


def _config_of_one(config: PreTrainedConfig, layer: _Stored) -> PreTrainedConfig:
    """Return the config of a model that has this layer only."""
    stored = config.to_dict()
    depth = config.num_hidden_layers
    of_layers = {
        name: [value[layer.like]]
        for name, value in stored.items()
        if isinstance(value, list) and len(value) == depth and not _NO_LISTS_OF_LAYERS.search(name)
    }
    told = {
        name: stored[f"mtp_{name}"][:1]
        for name in ("layer_types", "mlp_layer_types")
        if stored.get(f"mtp_{name}")
    }
    first_sparse = 0 if layer.is_sparse else 1
    kinds = {
        "decoder_sparse_step": 1,
        "first_k_dense_replace": first_sparse,
        "full_attention_interval": 1,
        "mlp_only_layers": [] if layer.is_sparse else [0],
        "moe_layer_end_index": 0,
        "moe_layer_interval": 1,
        "moe_layer_start_index": first_sparse,
        "ple_layer_ids": [],
    }
    changes = of_layers | kinds | dict(layer.naming.fields) | told
    known = {name: value for name, value in changes.items() if name in stored}
    one = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return type(config).from_dict(stored | known | one)


def _renamed(tensors: Tensors, stored: _Stored, root: str) -> Tensors:
    """Return the tensors of layer and end by the names of a model of one layer. Where the layer has
    no end, the model's serves; further tensors of its stem are the model's."""
    naming = stored.naming
    renamed = {}
    for name, tensor in stored.own.items():
        end = next((one for one in naming.ends if name.startswith(one)), None)
        if end is not None:
            renamed[root + naming.ends[end] + name.removeprefix(end)] = tensor
        elif name.startswith(naming.block):
            renamed[root + naming.layer + name.removeprefix(naming.block)] = tensor
    if not naming.ends:
        norm = f"{stored.root}norm.weight"
        renamed |= {f"{root}norm.weight": tensors[name] for name in (norm,) if name in tensors}
    return renamed


def _fusion(stored: _Stored, decoder: PreTrainedModel, offset: float) -> Fusion:
    naming = stored.naming
    read = {name: tensor[...] for name, tensor in stored.sides.items()}
    norms = [_norm(decoder, read[name] - offset) for name in _sides(naming)[:2]]
    project = [_linear(read[name]) for name in naming.project]
    kind = FusionOfStreams if len(project) > 1 else Fusion
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
    rules = (rule for rule in source.mapping(skeleton) if isinstance(rule, WeightConverter))
    return float(any(isinstance(rule.operations[0], SubtractOne) for rule in rules))
