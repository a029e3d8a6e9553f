"""Sources that a model is opened from: a folder of safetensors with a config.json, or GGUF files,
which hold everything."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightTransform

from artifacts.common.untrusted import has_json, read_json, readable
from artifacts.errors import BadInput, first_line
from artifacts.formats.stated import stated_quantisation
from runtime.model.families import check_family
from runtime.model.files.checkpoint import Checkpoint, open_checkpoint
from runtime.model.files.locate import is_gguf, parts_of, read_config
from runtime.model.gguf.config import gguf_config
from runtime.model.gguf.file import gguf_matrices, open_gguf
from runtime.model.gguf.mapping import gguf_mapping
from runtime.model.gguf.shape import gguf_dtype
from runtime.model.gguf.tokenizer import GgufTokenizer, gguf_tokenizer
from runtime.model.gguf.vocabulary import read_vocabulary
from runtime.model.quantised.quantised_tensor import Tensors, gather_matrices

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class GenerationSettings(NamedTuple):
    """Generation settings as stored in the file `path`: in a file of their own if `is_own`, else
    among much else."""

    path: Path
    is_own: bool
    stored: dict[str, object]


class Source(Protocol):
    """A stored model, at `path`. Its methods raise BadInput for what they cannot read; `tokenizer`
    raises whatever transformers raises."""

    path: Path

    def read_config(self) -> dict:
        """Return the config as stored."""

    def parse_config(self, stored: dict) -> PreTrainedConfig:
        """Parse the config with transformers; raises what that raises. Code that comes with a model
        is never run."""

    def open(self) -> Checkpoint: ...

    def tensors(self, checkpoint: Checkpoint, config: dict) -> Tensors:
        """Return the stored tensors; tensors that hold one matrix in few bits together become
        one."""

    def dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        """Return the dtype of the numbers, for a config that names none."""

    def mapping(self, model: PreTrainedModel) -> list[WeightTransform]:
        """Return the rules from stored names to the parameters of a model; they are new each time,
        as matching changes them."""

    def generation_settings(self) -> GenerationSettings: ...

    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    def unfollowed(self) -> tuple[str, ...]:
        """Return a line for each thing that is stored and left out."""


class SafetensorsFolder:
    """Source in the format that transformers writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_config(self) -> dict:
        config = read_config(self.path)
        check_family(config)
        return config

    def parse_config(self, stored: dict) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.path, trust_remote_code=False)

    def open(self) -> Checkpoint:
        return open_checkpoint(self.path)

    def tensors(self, checkpoint: Checkpoint, config: dict) -> Tensors:
        return gather_matrices(checkpoint.tensors, stated_quantisation(config, self.path))

    def dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        floating = (
            tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype.is_floating_point
        )
        return next(floating, torch.float32)

    def mapping(self, model: PreTrainedModel) -> list[WeightTransform]:
        return get_model_conversion_mapping(model)

    def generation_settings(self) -> GenerationSettings:
        own = self.path / "generation_config.json"
        path = own if readable(own) else self.path / "config.json"
        try:
            settings = read_json(path)
        except ValueError as error:
            raise BadInput(f"transformers cannot use {path}: {first_line(error)}") from error
        if not isinstance(settings, dict):
            raise BadInput(
                f"transformers cannot use {path}: it holds a {type(settings).__name__}, not a "
                "JSON object"
            )
        return GenerationSettings(path, path == own, settings)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        known = [name for name in TOKENIZER_FILES if readable(self.path / name)]
        for path in (self.path / name for name in known if name.endswith(".json")):
            has_json(path)
        if not known:
            return None
        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)

    def unfollowed(self) -> tuple[str, ...]:
        return ()


class GgufFile:
    """Source in the format that llama.cpp reads; `path` is the first file of several."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_config(self) -> dict:
        return gguf_config(self.path)

    def parse_config(self, stored: dict) -> PreTrainedConfig:
        return AutoConfig.for_model(**stored)

    def open(self) -> Checkpoint:
        return open_gguf(self.path)

    def tensors(self, checkpoint: Checkpoint, config: dict) -> Tensors:
        return gguf_matrices(checkpoint)

    def dtype(self, checkpoint: Checkpoint) -> torch.dtype:
        return getattr(torch, gguf_dtype(self.path))

    def mapping(self, model: PreTrainedModel) -> list[WeightTransform]:
        return gguf_mapping(self.path, model)

    def generation_settings(self) -> GenerationSettings:
        """Return the settings of the config, with all tokens that end an answer, since the config
        names one at most."""
        settings = gguf_config(self.path)
        if vocabulary := read_vocabulary(parts_of(self.path)[0]):
            settings |= {"eos_token_id": sorted(vocabulary.ends) or None}
        return GenerationSettings(self.path, False, settings)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    def unfollowed(self) -> tuple[str, ...]:
        return self._tokenizer.unfollowed if self._tokenizer else ()

    @cached_property
    def _tokenizer(self) -> GgufTokenizer | None:
        return gguf_tokenizer(parts_of(self.path)[0])


def source_of(path: Path) -> Source:
    """Return the source at the path that `locate` found."""
    return GgufFile(path) if is_gguf(path) else SafetensorsFolder(path)
