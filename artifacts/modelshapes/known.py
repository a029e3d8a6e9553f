"""Shapes of full-size models, by name or from a config.json: enough to simulate them without their
weights.

The figures come from the configs published with the checkpoints. Only MoE layers are counted, dense
layers are not.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from artifacts.common.suggestions import unknown
from artifacts.common.untrusted import existing, read_json
from artifacts.errors import BadInput, BadUsage
from artifacts.formats.stated import Stated, stated_quantisation
from artifacts.modelshapes.attention import ATTENTIONS, Matrix
from artifacts.modelshapes.fields import Fields
from artifacts.modelshapes.layer_kinds import attentions_of
from artifacts.modelshapes.published import CONFIGS
from artifacts.shape import MOST_LAYERS, Shape

_PROJECTIONS = 3  # gate, up, down
_DTYPE_NBYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
_MXFP4_NBYTES = 4.25 / 8  # 4 bits a weight, and 8 bits for each 32 weights
_GPTQ_4_NBYTES = (
    4 + (16 + 4) / 128
) / 8  # 4 bits a weight, and a scale and a zero-point for each 128


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that its costs depend on. `shape` describes its MoE layers, `hidden` is the
    hidden size H, `shared_nbytes` the bytes per layer of the experts that every token uses,
    `vocabulary` the words in its vocabulary. `weight_nbytes` is the bytes of one expert weight as
    stored, `dtype_nbytes` of any other weight in memory. `assumed` lists what was unknown and what
    was assumed instead. `attention_weights`: of one layer, 0 where its heads are unknown."""

    name: str
    shape: Shape
    hidden: int
    shared_nbytes: int = 0
    vocabulary: int = 0
    weight_nbytes: float = 2.0
    dtype_nbytes: float = 2.0
    assumed: tuple[str, ...] = ()
    attention_weights: int = 0

    @property
    def attention_nbytes(self) -> int:
        """Bytes of one layer's attention in 16 bits: without heads to go by, of four matrices of H
        x H."""
        return 2 * (self.attention_weights or 4 * self.hidden**2)


def _published(
    name: str,
    layers: int,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    *,
    shared: int = 0,
    weight_nbytes: float = 2.0,
) -> ModelShape:
    """`shared`: intermediate size of all experts together that every token uses."""
    per_neuron = _PROJECTIONS * hidden * weight_nbytes
    shape = Shape(
        layers, experts, top_k, round(per_neuron * intermediate), intermediate, int(per_neuron)
    )
    return ModelShape(
        name,
        shape,
        hidden,
        _PROJECTIONS * hidden * shared * 2,
        vocabulary,
        weight_nbytes,
        attention_weights=ATTENTIONS[name].num_weights(hidden),
    )


MODELS = {
    model.name: model
    for model in (
        _published("mixtral-8x7b", 32, 8, 2, 4096, 14336, 32000),
        _published("mixtral-8x22b", 56, 8, 2, 6144, 16384, 32768),
        _published("olmoe-1b-7b", 16, 64, 8, 2048, 1024, 50304),
        _published("qwen1.5-moe-a2.7b", 24, 60, 4, 2048, 1408, 151936, shared=5632),
        _published("qwen2-57b-a14b", 28, 64, 8, 3584, 2560, 151936, shared=20480),
        _published("deepseek-v2-lite", 26, 64, 6, 2048, 1408, 102400, shared=2816),
        _published("deepseek-v2", 59, 160, 6, 5120, 1536, 102400, shared=3072),
        _published("deepseek-v3", 58, 256, 8, 7168, 2048, 129280, shared=2048, weight_nbytes=1.0),
        _published("qwen3-30b-a3b", 48, 128, 8, 2048, 768, 151936),
        *(
            _published(name, 94, 128, 8, 4096, 1536, 151936, weight_nbytes=nbytes)
            for name, nbytes in (
                ("qwen3-235b-a22b", 2.0),
                ("qwen3-235b-a22b-fp8", 1.0),
                ("qwen3-235b-a22b-gptq-int4", _GPTQ_4_NBYTES),
            )
        ),
        _published("phi-3.5-moe", 32, 16, 2, 4096, 6400, 32064),
        _published("gpt-oss-20b", 24, 32, 4, 2880, 2880, 201088, weight_nbytes=_MXFP4_NBYTES),
        _published("gpt-oss-120b", 36, 128, 4, 2880, 2880, 201088, weight_nbytes=_MXFP4_NBYTES),
    )
}
_GUESSED_NBYTES = MODELS["olmoe-1b-7b"].shape.expert_nbytes


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model from the table, a config.json or the folder that holds it; an
    existing path wins.

    Raises BadUsage for a name that is neither, BadInput for a config that does not describe an MoE
    model.
    """
    path = existing(name)
    if path is not None:
        return from_config(path / "config.json" if path.is_dir() else path)
    if name.startswith(("/", ".", "~")):
        raise BadUsage(
            f"there is no {name}: give a folder with a config.json, or a name as olmoe-1b-7b"
        )
    if name.lower() not in MODELS:
        raise BadUsage(f"{unknown('model', name, MODELS)} (or give a folder with a config.json)")
    return MODELS[name.lower()]


def guessed(shape: Shape) -> ModelShape:
    """Assume the rest of a model from its shape alone: a hidden size of twice the intermediate
    size, no shared experts."""
    hidden = round(math.sqrt(shape.expert_nbytes / (_PROJECTIONS * _DTYPE_NBYTES["bfloat16"] / 2)))
    note = (
        f"hidden size {hidden:,}, for which such an expert is half as wide; no shared experts, no "
        "head"
    )
    return ModelShape("unknown", shape, hidden, assumed=(note,))


def unsized(num_layers: int, num_experts: int, top_k: int) -> ModelShape:
    """Return a model from its routing alone: its experts are assumed to be as large as in
    OLMoE-1B-7B."""
    sized = guessed(Shape(num_layers, num_experts, top_k, _GUESSED_NBYTES))
    note = (
        f"experts of {_GUESSED_NBYTES / 2**20:.0f} MiB, as those of OLMoE-1B-7B; --model gives "
        "another size"
    )
    return ModelShape(sized.name, sized.shape, sized.hidden, assumed=(note, *sized.assumed))


def from_config(path: Path) -> ModelShape:
    """Read a shape from a transformers config.json; experts have three projections. Raises
    BadInput."""
    return shape_of(path.parent.name or path.name, read_config(path), path, read_quantisation(path))


def shape_of(name: str, config: Mapping, path: Path, quantisation: Stated | None) -> ModelShape:
    """Return the shape of the model with this config, which `path` is named for in errors. Raises
    BadInput."""
    fields = Fields(config, path)
    hidden = _first(fields, "hidden_size")
    of_experts = fields.get("routed_expert_hidden_size") or hidden
    intermediate = _first(fields, "moe_intermediate_size", "intermediate_size")
    layers = moe_layers(fields)
    module = f"layers.{max(layers, default=0)}.mlp.experts.0"  # which stands for all
    expert = _expert_sizes(config, list(gated(module, of_experts, intermediate)), quantisation)
    dtype_nbytes = dtype_size(config)
    shared = _PROJECTIONS * hidden * _shared_width(fields, intermediate)
    return ModelShape(
        name,
        Shape(len(layers), _first(fields, *_NUM_EXPERTS), _first(fields, *_TOP_K), **expert),
        hidden,
        round(shared * dtype_nbytes),
        _first(fields, "vocab_size"),
        weight_nbytes=expert["expert_nbytes"] / (_PROJECTIONS * of_experts * intermediate),
        dtype_nbytes=dtype_nbytes,
        attention_weights=_attention_weights(fields, hidden),
    )


def _expert_sizes(
    config: Mapping, expert: list[Matrix], quantisation: Stated | None
) -> dict[str, int]:
    """Return the fields of `Shape` for an expert of these matrices. A packed one has no neurons
    that could be cut."""
    weight_nbytes = dtype_size(config)
    if config.get("expert_dtype") == "fp4":  # DeepSeek-V4, whatever else its config says
        weight_nbytes = _MXFP4_NBYTES
    elif quantisation is not None:
        stored = (matrix_nbytes(quantisation, *matrix, weight_nbytes) for matrix in expert)
        return {"expert_nbytes": sum(stored)}
    _, intermediate, hidden = expert[0]
    neuron_nbytes = _PROJECTIONS * hidden * weight_nbytes
    return {
        "expert_nbytes": round(neuron_nbytes * intermediate),
        "num_neurons": intermediate,
        "neuron_nbytes": round(neuron_nbytes),
    }


def _attention_weights(fields: Fields, hidden: int) -> int:
    """Return the mean over layers, 0 where heads are unknown."""
    if not fields.config.get("num_attention_heads"):
        return 0
    attentions = attentions_of(*fields)
    weights = sum(
        rows * columns for each in attentions for _, rows, columns in each.matrices(hidden)
    )
    return weights // len(attentions)


def gated(name: str, hidden: int, width: int) -> Iterator[Matrix]:
    """Yield the three matrices of a gated layer of `width` neurons; none where `width` is 0."""
    if width:
        yield f"{name}.gate_proj", width, hidden
        yield f"{name}.up_proj", width, hidden
        yield f"{name}.down_proj", hidden, width


def matrix_nbytes(
    stated: Stated | None, module: str, rows: int, columns: int, dtype_nbytes: float
) -> int:
    """Bytes of a matrix in the files of a checkpoint. The prefix of a module differs between text
    models and those with other parts."""
    schemes = [stated.scheme_of(prefix + module) for prefix in _PREFIXES] if stated else [None]
    return (
        round(rows * columns * dtype_nbytes)
        if None in schemes
        else schemes[0].nbytes(rows, columns)
    )


def read_config(path: Path) -> Mapping:
    """Return the fields of a config.json, or of its text model where it describes several. Raises
    BadInput."""
    config = _whole(path)
    text = config.get("text_config", config)
    return text if isinstance(text, Mapping) else {}


def read_quantisation(path: Path) -> Stated | None:
    """Return what a config.json, or a file beside it, says of its quantisation. Raises BadInput."""
    return stated_quantisation(_whole(path), path.parent)


def _whole(path: Path) -> Mapping:
    if path.suffix == ".gguf":
        raise BadInput(
            f"{path.name} has no config.json: give the model's name, as qwen3-30b-a3b, or its "
            "config.json"
        )
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as a model's config.json: {error}") from error
    return config if isinstance(config, Mapping) else {}


def dtype_size(config: Mapping) -> float:
    """Bytes of a weight in the dtype that the config names."""
    return _DTYPE_NBYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2.0)


def _shared_width(fields: Fields, intermediate: int) -> int:
    """Intermediate size of all experts together that every token uses."""
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if width := fields.get(name):
            return width
    if fields.config.get("enable_moe_block"):  # Gemma 4 adds its experts to a dense layer
        return _first(fields, "intermediate_size")
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return intermediate * max(map(fields.get, names))


def moe_layers(fields: Fields) -> list[int]:
    """The layers that have experts. Raises BadInput."""
    num_layers = _first(fields, "num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise BadInput(
            f"{fields.path} says {num_layers:,} layers: no model has more than {MOST_LAYERS:,}"
        )
    for name in ("mlp_layer_types", "moe_layer_freq"):
        kinds = fields.config.get(name)
        if isinstance(kinds, list) and len(kinds) == num_layers:
            return [layer for layer, kind in enumerate(kinds) if kind not in ("dense", 0)]
    return _periodic_layers(fields, num_layers)


def _periodic_layers(fields: Fields, num_layers: int) -> list[int]:
    """Return every so many layers behind the first ones, without those that are named as dense."""
    config = fields.config
    first = fields.get("first_k_dense_replace")
    period = fields.get("decoder_sparse_step") or fields.get("moe_layer_freq") or 1
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise BadInput(f"{fields.path} has mlp_only_layers that are no list: download it again")
    offset = 1 if "decoder_sparse_step" in config else 0
    return [
        layer
        for layer in range(first, num_layers)
        if (layer + offset) % period == 0 and layer not in dense
    ]


def _first(fields: Fields, *names: str) -> int:
    """The first of these fields that is set. Raises BadInput when none is."""
    if number := next(filter(None, map(fields.get, names)), 0):
        return number
    raise BadInput(
        f"{fields.path} has no {' or '.join(names)}: it is no config of a Mixture-of-Experts model"
    )


MODELS |= {name: shape_of(name, config, Path(name), None) for name, config in CONFIGS.items()}
