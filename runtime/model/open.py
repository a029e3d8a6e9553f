"""Opens a Mixture-of-Experts model without its experts: all else is loaded, and the experts can be
read one by one."""

from dataclasses import dataclass, replace
from math import inf, isnan, prod
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from artifacts.errors import BadInput, first_line
from artifacts.shape import FULL_BITS, Shape
from runtime.model.files.checkpoint import Checkpoint
from runtime.model.files.config_fields import check_fields, check_value, unfollowed_fields
from runtime.model.files.expert_store import DiskStore
from runtime.model.files.expert_tensors import locate_experts
from runtime.model.files.fingerprint import fingerprint
from runtime.model.files.locate import locate
from runtime.model.files.row_table import leave_in_files, table_names
from runtime.model.files.source import Source, source_of
from runtime.model.generation_config import load_generation_config
from runtime.model.layers import MoeLayer, moe_layers
from runtime.model.layout import ExpertLayout, ExpertStore
from runtime.model.quantised.dense_bits import DenseWidth
from runtime.model.quantised.quantised_tensor import Tensors
from runtime.model.skeleton import build_skeleton, load_resident
from runtime.model.trial import try_model

# of attention, in tokens
_WINDOWS = ("sliding_window", "attention_chunk_size")
_LEAST_WINDOW = 2
_MOST = torch.finfo(torch.float32).max  # the largest number that torch computes with in float32
_COMPUTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
)  # config entries for the number of layers


@dataclass(frozen=True, slots=True)
class MoeModel:
    """`model` in evaluation mode, experts on `meta`; `store` reads them from the checkpoint by
    layer and expert.

    `tokenizer` is None if the folder has none. `fingerprint` identifies the model, wherever its
    folder lies. On a low-bit `base`
    (runtime/session/equip.py), `store` reads replicas and `shape` has their bytes; `dtype` and
    `stored_shape`, by which the artefact store identifies the model, stay the checkpoint's.
    `sum_dtype` is that in which the model adds experts up. `unfollowed` has a line for each
    generation setting of the checkpoint that is left out, for the part of a multimodal model that
    is not loaded, and for each table that cannot stay in the files. `dense` says how linear layers
    besides experts and routers are quantised; None: they are as published. Where layers store
    experts in different ways, `variants` has the number of each layer's in the store's layout.
    `activations` are the bits to which compiled code rounds tokens; None: it does not.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    layers: tuple[MoeLayer, ...]
    shape: Shape
    store: ExpertStore
    fingerprint: str
    family: str
    dtype: torch.dtype
    sum_dtype: torch.dtype
    stored_shape: Shape
    source: Source
    base: int = FULL_BITS
    unfollowed: tuple[str, ...] = ()
    variants: tuple[int, ...] = ()
    dense: DenseWidth | None = None
    activations: int | None = None

    @property
    def weight_nbytes(self) -> float:
        """Bytes of one weight of an expert as it is stored, with its share of scales."""
        return self.shape.expert_nbytes / sum(map(prod, self.layers[0].shapes.values()))

    @property
    def expert_format(self) -> str:
        """Format of the stored experts and their bits per weight, as `mxfp4, 4.25 bits`."""
        return f"{self.store.layout.format}, {8 * self.weight_nbytes:.3g} bits"


def open_model(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    dense: int | None = None,
) -> MoeModel:
    """Open a local folder or a hub id without ever holding its experts in memory.

    `dtype` defaults to the checkpoint's own; `dense` keeps linear layers besides experts and
    routers at 8 or 4 bits. Raises BadInput for a model that is incomplete, damaged or refused,
    BadUsage for another number of bits.
    """
    read = _read(name, dtype)
    source = read.source
    config = read.config
    dtype = read.dtype
    model = _skeleton(read)
    layers = moe_layers(model)
    layout = ExpertLayout.of(layers[0].shapes, dtype)
    plain = _shape(layers, layout)
    located = locate_experts(
        model,
        layers,
        shape=plain,
        layout=layout,
        tensors=read.tensors,
        mapping=source.mapping(model),
        tables=table_names(model),
    )
    shape = _as_stored(plain, located.layout)
    whole = leave_in_files(model, located.tables, dtype)
    width = load_resident(
        model, layers, located.others, dtype=dtype, device=device, source=source, dense=dense
    )
    tokenizer = _tokenizer(source, model.get_input_embeddings().num_embeddings)
    store = DiskStore(read.checkpoint, located.layout, shape=shape, extents=located.extents)
    opened = MoeModel(
        model=model,
        config=model.config,
        tokenizer=tokenizer,
        layers=layers,
        shape=shape,
        store=store,
        fingerprint=fingerprint(read.stored_config, read.checkpoint),
        family=config.model_type,
        dtype=dtype,
        sum_dtype=try_model(model, layers),
        stored_shape=shape,
        source=source,
        unfollowed=(
            *source.unfollowed(),
            *_text_only(config),
            *whole,
            *unfollowed_fields(read.stored_config, model),
            *load_generation_config(model, source.path, tokenizer),
        ),
        variants=store.variants(),
        dense=width,
    )
    read.checkpoint.check_unchanged()
    return opened


def open_whole(
    name: str, *, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Open a small model, dense or with experts, all of whose weights stay in memory, and its
    tokenizer. Raises BadInput for a model that is incomplete, damaged or refused."""
    read = _read(name, None)
    model = _skeleton(read)
    load_resident(model, (), read.tensors, dtype=read.dtype, device=device, source=read.source)
    tokenizer = _tokenizer(read.source, model.get_input_embeddings().num_embeddings)
    read.checkpoint.check_unchanged()
    return model, tokenizer


class _Read(NamedTuple):
    """A stored model before it is built."""

    source: Source
    stored_config: dict
    checkpoint: Checkpoint
    tensors: Tensors
    config: PreTrainedConfig
    dtype: torch.dtype


def _read(name: str, dtype: torch.dtype | None) -> _Read:
    source = source_of(locate(name))
    stored_config = source.read_config()
    checkpoint = source.open()
    tensors = source.tensors(checkpoint, stored_config)
    _check_numbers(stored_config, checkpoint)
    config = _parsed(source, stored_config)
    _check_windows(config, source.path)
    dtype = dtype or config.dtype or config.get_text_config().dtype or source.dtype(checkpoint)
    _check_dtype(dtype, source)
    return _Read(source, stored_config, checkpoint, tensors, config, dtype)


def _text_only(config: PreTrainedConfig) -> tuple[str, ...]:
    is_multimodal = config.get_text_config() is not config
    return (
        f"{config.model_type} is opened for text: its weights for other input are not loaded",
    ) * is_multimodal


def _parsed(source: Source, stored: dict) -> PreTrainedConfig:
    try:
        return source.parse_config(stored)
    except Exception as error:  # transformers raises anything on a broken config.json
        raise BadInput(
            f"transformers cannot use the config.json of {source.path}: {first_line(error)}"
        ) from error


def _check_windows(config: PreTrainedConfig, path: Path) -> None:
    """Raise BadInput for a window of attention below two tokens. With 0 no token is left to attend
    to. With 1 transformers' cache keeps all tokens and its masks only the last, so that the result
    depends on the sizes of passes."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and set(kinds) <= {"full_attention"}:
        return
    for name in _WINDOWS:
        window = getattr(text, name, None)
        if isinstance(window, int) and window < _LEAST_WINDOW:
            raise BadInput(
                f"the config of {path} says {name} {window}, and attention needs a window of "
                f"{_LEAST_WINDOW} tokens or more: give null where the model has none"
            )


def _skeleton(read: _Read) -> PreTrainedModel:
    model = build_skeleton(read.config, read.dtype)
    check_fields(read.stored_config, read.config, model)
    return model


def _shape(layers: tuple[MoeLayer, ...], layout: ExpertLayout) -> Shape:
    first = layers[0]
    return Shape(
        num_layers=len(layers),
        num_experts=first.num_experts,
        top_k=first.top_k,
        expert_nbytes=layout.nbytes,
        num_neurons=first.num_neurons,
        neuron_nbytes=first.neuron_weights * layout.dtype.itemsize,
    )


def _as_stored(shape: Shape, layout: ExpertLayout) -> Shape:
    """Return the shape with the bytes of experts as they are stored; packed experts have no neurons
    that could be cut."""
    if layout.is_plain:
        return shape
    return replace(shape, expert_nbytes=layout.nbytes, num_neurons=0, neuron_nbytes=1)


def _check_dtype(dtype: torch.dtype, source: Source) -> None:
    if dtype not in _COMPUTED:
        known = ", ".join(str(each).removeprefix("torch.") for each in _COMPUTED)
        given = str(dtype).removeprefix("torch.")
        raise BadInput(f"the config.json in {source.path} says dtype {given}: write one of {known}")


def _check_numbers(config: object, checkpoint: Checkpoint) -> None:
    """Raise BadInput for NaN, for a number beyond every dtype, for a value that no model has in its
    field, and for more layers than tensors, which would take forever to build."""
    parts = (
        config.items()
        if isinstance(config, dict)
        else enumerate(config)
        if isinstance(config, list)
        else ()
    )
    for name, value in parts:
        is_beyond = isinstance(value, int) and abs(value) >= 1 << 63
        if is_beyond or isinstance(value, float) and (isnan(value) or _MOST < abs(value) < inf):
            raise BadInput(
                f"the config.json in {checkpoint.folder} says {name} {str(value)[:30]}: download "
                "it again"
            )
        if name in DEPTHS and isinstance(value, int | float) and value > len(checkpoint.tensors):
            raise BadInput(
                f"the config.json in {checkpoint.folder} says {name} {value}, and the checkpoint "
                f"has {len(checkpoint.tensors):,} tensors: they are not of the same model"
            )
        check_value(name, value, checkpoint.folder)
        _check_numbers(value, checkpoint)


def _tokenizer(source: Source, vocabulary: int) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer, None if there is none. Tokens that were added to it are checked when they
    are used."""
    try:
        tokenizer = source.tokenizer()
        if tokenizer is not None:
            tokenizer("a")  # some bad settings raise only at the first use
    except BadInput:
        raise
    except Exception as error:  # None would look like a model without a tokenizer
        raise BadInput(
            f"the tokenizer in {source.path} cannot be loaded: {first_line(error)}"
        ) from error
    if tokenizer is not None and tokenizer.vocab_size > vocabulary:
        raise BadInput(
            f"the tokenizer in {source.path} has {tokenizer.vocab_size:,} tokens, the model "
            f"{vocabulary:,}: it is another model's, download it again"
        )
    return tokenizer
