"""Facts about a checkpoint before it is opened, from its config and the headers of its files, in a
moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.common.untrusted import existing, readable
from artifacts.errors import BadInput
from artifacts.formats.dense import DENSE
from artifacts.formats.stated import stated_quantisation
from artifacts.modelshapes.known import ModelShape, from_config
from artifacts.modelshapes.memory import backbone_memory, backbone_of
from artifacts.shape import Shape
from runtime.model.families import check_family
from runtime.model.files.hub.kept import path_elsewhere
from runtime.model.files.hub.names import hub_name
from runtime.model.files.hub.repository import cached
from runtime.model.files.locate import check_name, is_gguf, locate, read_config, safetensors_files
from runtime.model.gguf.config import gguf_config
from runtime.model.gguf.shape import gguf_dtype, gguf_shape, gguf_types


@dataclass(frozen=True, slots=True)
class CheckpointGlance:
    """Facts about a checkpoint that is not opened.

    `shape` is None if the config does not say it, with the reason in `unknown`. `dtype` is the one
    that the model is computed in. `expert_format` is the format of its experts, as `mxfp4, 4.25
    bits`; `weight_nbytes` are the bytes of one of their weights with its share of scales.
    `dense_nbytes` are the bytes of all other weights in memory, by the bits of `--dense`, None as
    published; empty where that is unknown.
    """

    shape: Shape | None
    dtype: str
    expert_format: str = ""
    weight_nbytes: float = 0.0
    unknown: str = ""
    dense_nbytes: Mapping[int | None, int] = field(default_factory=dict)


def glance(name: str) -> CheckpointGlance:
    """Look at a folder, a GGUF file, or a model of the hub that was downloaded, without torch.

    Raises BadInput for a model that is not here, that lacks files or is truncated, and for a family
    or format that moectl does not read.
    """
    folder = locate(name) if existing(name) else _downloaded(name)
    if is_gguf(folder):
        return _of_gguf(folder)
    config = read_config(folder)
    check_family(config)
    stated = stated_quantisation(config, folder)
    _check_files(folder)
    dtype = _dtype(config)
    try:
        model = from_config(folder / "config.json")
    except BadInput as error:
        return CheckpointGlance(None, dtype, unknown=str(error))
    layouts = (
        " and ".join(dict.fromkeys(scheme.layout for scheme in stated.schemes)) if stated else dtype
    )
    return CheckpointGlance(
        model.shape,
        dtype,
        f"{layouts}, {8 * model.weight_nbytes:.3g} bits",
        model.weight_nbytes,
        dense_nbytes=_dense_nbytes(model, folder),
    )


def _dtype(config: Mapping) -> str:
    """Return the dtype that a config names, for the whole model or for its text part."""
    parts = (part for part in (config, config.get("text_config")) if isinstance(part, Mapping))
    named = (part.get("dtype") or part.get("torch_dtype") for part in parts)
    return str(next(filter(None, named), "its own dtype"))


def _dense_nbytes(model: ModelShape, folder: Path) -> dict[int | None, int]:
    """Return the bytes of dense weights by width; empty where the config does not say what
    attention consists of."""
    try:
        backbone = backbone_of(str(folder))
        return {
            bits: backbone_memory(model, backbone, dense=bits).weights_nbytes
            for bits in (None, *DENSE)
        }
    except BadInput:
        return {}


def _downloaded(name: str) -> Path:
    """Return the path of a model that is on this machine under a name that is no path."""
    check_name(name)
    try:
        return path_elsewhere(name) or cached(hub_name(name))
    except FileNotFoundError as error:
        raise BadInput(
            f"{name!r} is neither a folder here nor a model of the hub that was downloaded: check "
            "the path or the id; --measure downloads it"
        ) from error


def _check_files(folder: Path) -> None:
    """Raise BadInput unless every file of the weights is there and whole."""
    from safetensors import SafetensorError, safe_open

    for path in safetensors_files(folder):
        try:
            if readable(path):
                with safe_open(path, framework="numpy"):
                    continue
        except SafetensorError as error:
            raise BadInput(
                f"{path} is truncated or no safetensors file: download it again"
            ) from error
        raise BadInput(f"{path} is missing: download it again")


def _of_gguf(path: Path) -> CheckpointGlance:
    gguf_config(path)  # which refuses what is not read
    model, _ = gguf_shape(path)
    return CheckpointGlance(
        model.shape,
        gguf_dtype(path),
        f"{gguf_types(path)}, {8 * model.weight_nbytes:.3g} bits",
        model.weight_nbytes,
        dense_nbytes={
            bits: gguf_shape(path, dense=bits)[1].weights_nbytes for bits in (None, *DENSE)
        },
    )
