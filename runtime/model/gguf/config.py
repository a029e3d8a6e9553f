"""Reader of a model's config from the header of its GGUF file, in the terms of transformers;
without torch."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import PLAIN, GgufHeader, GgufTensor, read_header
from runtime.model.files.locate import parts_of
from runtime.model.gguf.architectures import architecture_of
from runtime.model.gguf.layout import Architecture, head_dim, num_layers

_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.unknown_token_id": "unk_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"  # a tenth of `mscale_all_dim` of DeepSeek's
_OF_NO_USE = ("rope.scaling.finetuned",)
_FACTORS = "rope_freqs.weight"
_MOST_FACTORS = 4096


def read_headers(path: Path) -> list[GgufHeader]:
    """Read the headers of a GGUF file, or of all parts if its name says that it is one of several.

    Raises BadInput, also for parts that do not belong together.
    """
    parts = parts_of(path)
    headers = [read_header(part) for part in parts]
    for number, part in enumerate(parts):
        _check_place(part, number, headers)
    names = Counter(name for header in headers for name in header.tensors)
    stated = headers[0].entries.get("split.tensors.count", len(names))
    if names.total() > len(names) or stated != len(names):
        raise BadInput(
            f"the parts of {path} have {len(names):,} different tensors in {names.total():,}, and "
            f"the model has {str(stated)[:20]}: they are of different models, download them again"
        )
    return headers


def _check_place(part: Path, number: int, headers: list[GgufHeader]) -> None:
    """Raise BadInput for a part whose header contradicts its name or the first part."""
    first = headers[0].entries
    entries = headers[number].entries
    stated = entries.get("split.count", len(headers)) or 1, entries.get("split.no", number)
    if stated != (len(headers), number):
        shown = ", ".join(
            f"{key} {str(entries.get(key))[:20]}" for key in ("split.no", "split.count")
        )
        raise BadInput(
            f"{part} says {shown}, counted from 0, and its name that it is part {number + 1} of "
            f"{len(headers)}: give the files the names that they were downloaded with"
        )
    for key in entries.keys() & first.keys():
        if (
            not key.startswith("split.")
            and key != "general.alignment"
            and entries[key] != first[key]
        ):
            raise BadInput(f"{part} says {key} otherwise than the first part: download both again")


def gguf_config(path: Path) -> dict:
    """Return the config of transformers that a GGUF file describes, as a dict with its
    `model_type`.

    Raises BadInput for an architecture that is not read, and for what the family does not compute.
    """
    headers = read_headers(path)
    tensors = {name: each for header in headers for name, each in header.tensors.items()}
    metadata = headers[0].entries
    form, own = architecture_of(path, metadata)
    if "token_embd.weight" not in tensors:
        raise BadInput(
            f"{path} has no token_embd.weight: it is a vocabulary or a part of a model, take the "
            "whole"
        )
    own |= _factors(path, headers)
    _check(path, form, own)
    if "by_turns" in form.gate_up:
        _check_experts(path, form, tensors)
    config = {
        "model_type": form.family,
        **form.fixed,
        **_renamed(own, form.fields),
        **_renamed(metadata, _TOKENS),
    }
    config.setdefault("vocab_size", metadata.get("tokenizer.ggml.tokens"))
    scaled = _rope_parameters(path, form, own)
    config |= {"rope_parameters": scaled} | _counted(path, form, own, tensors)
    if full := config["rope_parameters"].get("full_attention"):  # its layers alone are scaled
        config["rope_parameters"]["full_attention"] = scaled | full
    config |= {"tie_word_embeddings": "output.weight" not in tensors}
    if form.text_family:
        text = config | {"model_type": form.text_family}
        return {"model_type": form.family, "text_config": text}
    return config


def _factors(path: Path, headers: Sequence[GgufHeader]) -> dict[str, object]:
    """Return the factors of the frequencies by which positions turn a head, which are a tensor and
    no entry, as `rope_freqs`."""
    for part, header in zip(parts_of(path), headers, strict=True):
        tensor = header.tensors.get(_FACTORS)
        if tensor and tensor.type == PLAIN[0]:
            numbers = array("f")
            with part.open("rb") as file:
                file.seek(tensor.offset)
                numbers.frombytes(file.read(min(tensor.nbytes, _MOST_FACTORS * numbers.itemsize)))
            return {"rope_freqs": list(numbers)}
    return {}


def _check(path: Path, form: Architecture, own: Mapping[str, object]) -> None:
    if (gating := own.get("expert_gating_func", form.gating)) != form.gating:
        raise BadInput(
            f"{path} says expert_gating_func {gating}, and {form.family} computes {form.gating}"
        )
    for name in form.required:
        if own.get(name) is None:
            raise BadInput(
                f"{path} does not say {name}, which {form.family} needs: take a newer file"
            )
    for name, usual in form.usual.items():
        if own.get(name, usual) != usual:
            raise BadInput(
                f"{path} says {name} {str(own[name])[:30]}, which {form.family} does not compute"
            )
    if form.is_latent:
        return
    if not form.is_partly_turned and own.get("rope.dimension_count") not in (None, head_dim(own)):
        raise BadInput(
            f"{path} turns a part of each head (rope.dimension_count), which {form.family} does "
            "not compute"
        )


def _check_experts(path: Path, form: Architecture, tensors: Mapping[str, GgufTensor]) -> None:
    """Raise BadInput for experts that could not be put in the order of the module: experts that are
    not packed, and gate and up in one tensor."""
    for name, tensor in tensors.items():
        if "_gate_up_exps." in name or name.endswith("_exps.weight") and tensor.type in PLAIN:
            raise BadInput(
                f"{path}: {name} is {tensor.type.name}; of {form.family} moectl reads packed "
                "experts, as MXFP4, with gate and up apart: take such a file"
            )


def _rope_parameters(
    path: Path, form: Architecture, own: Mapping[str, object]
) -> dict[str, object]:
    """Return the rope parameters of the config: positions that are not scaled, or scaled by YaRN.
    Raises BadInput for any other scaling."""
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    read = (*_SCALING, *_OF_NO_USE, *(_LOG_MULTIPLIER,) * form.is_latent)
    unread = [key for key in own if key.startswith("rope.scaling.") and key not in read]
    if kind != "yarn" or unread:
        raise BadInput(
            f"{path} scales its positions by {', '.join([str(kind)[:40], *unread])}: moectl reads "
            "yarn alone"
        )
    return {
        **form.fixed_scaling,
        **_renamed(own, _SCALING),
        **(_weighted(path, own) if form.is_latent else {}),
    }


def _weighted(path: Path, own: Mapping[str, object]) -> dict[str, float]:
    """Return DeepSeek's two YaRN factors of attention, which are equal in all its models, so that
    turned positions have no factor of their own. Raises BadInput if the file lacks them."""
    if not (multiplier := own.get(_LOG_MULTIPLIER)):
        raise BadInput(
            f"{path} scales its positions by yarn and does not say {_LOG_MULTIPLIER}: take a "
            "newer file"
        )
    weight = round(10 * multiplier, 6)  # it is stored in float32
    return {"mscale": weight, "mscale_all_dim": weight}


def _counted(
    path: Path, form: Architecture, own: Mapping[str, object], tensors: Mapping[str, GgufTensor]
) -> dict[str, object]:
    """Return the fields that are computed from several entries, or from which tensors there are.
    Raises BadInput for entries that contradict each other."""
    try:
        fields = form.counted(own, tensors) | {"num_hidden_layers": num_layers(own)}
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise BadInput(
            f"{path} does not say how its layers differ ({error}): download it again"
        ) from error
    if form.is_partly_turned:
        fields["partial_rotary_factor"] = own.get("rope.dimension_count", head_dim(own)) / head_dim(
            own
        )
    return fields


def _renamed(entries: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Return the entries that have a name in transformers, under that name."""
    return {new: entries[old] for old, new in names.items() if entries.get(old) is not None}
