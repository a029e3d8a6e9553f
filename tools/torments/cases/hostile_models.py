"""Untrusted checkpoints: wrong headers, indexes, configs, tokenizers and tensors."""

import json
import logging
import math
import os
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before huggingface_hub is imported, which reads it once

import torch
from transformers.utils import logging as their_logging

from artifacts.errors import BadInput
from artifacts.formats.gguf.gguf_header import read_header
from artifacts.modelshapes.known import model_shape
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.locate import INDEX, SINGLE
from runtime.model.gguf.config import gguf_config
from runtime.model.gguf.file import open_gguf
from runtime.model.gguf.shape import gguf_shape
from runtime.model.gguf.vocabulary import read_vocabulary
from runtime.model.layout import aligned
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings
from tests.helpers import families, gguf_files
from tests.helpers.safetensors import Tensors, joined, parsed
from tools.lab.gptq_reader import GptqCheckpoint
from tools.torments.cases import Lost
from tools.torments.hostile import (
    FRACTIONS,
    NUMBERS,
    Hostile,
    altered,
    as_text,
    damaged,
    odd,
    refusal,
    write,
)

_PROMPT = torch.tensor([[5, 6, 7]])
_LAYOUTS = (
    ("olmoe", "hub"),
    ("olmoe", "fused"),
    ("deepseek_v2", "hub"),
    ("gpt_oss", "hub"),
    ("qwen3_moe", "hub"),
)
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


class HostileModels(Hostile):
    """Damage or alter one file of a small checkpoint; open it, and decode a token if that
    succeeds."""

    classes = (8, 11, 12, 21)

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        their_logging.set_verbosity(logging.CRITICAL)
        logging.disable(logging.CRITICAL)
        self._folder = ground / "case"
        self._sources = {}
        for family, layout in _LAYOUTS:
            made = families.save(family, layout, ground / f"{family}-{layout}")
            self._sources[family, layout] = {
                path.name: path.read_bytes() for path in made.iterdir()
            }
        path = gguf_files.write("qwen3_moe", ground / "whole.gguf", gguf_files.BY_PROJECTION)
        self._gguf = path.read_bytes()
        self._gguf_start = min(each.offset for each in read_header(path).tensors.values())
        self._kinds = {
            "8: GGUF header damaged": (4, self._gguf_damaged),
            "8: header damaged": (8, self._header_damaged),
            "8: header altered": (8, self._header_altered),
            "8: GPTQ files altered": (4, self._gptq),
            "21: index altered": (8, self._index),
            "21: config altered": (3, self._config),
            "21: a number of the config": (4, self._number),
            "21: shape of a config altered": (8, self._shape),
            "12: texts of the tokenizer altered": (2, self._texts),
            "11: a tensor missing": (1, self._missing),
            "11: numbers not finite": (1, self._not_finite),
            "11: a tensor of another shape": (1, self._reshaped),
        }

    def _put(self, rng: random.Random, *, layout: tuple[str, str] | None = None) -> Path:
        """A fresh copy of one of the checkpoints."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for name, content in self._sources[layout or rng.choice(_LAYOUTS)].items():
            write(self._folder / name, content)
        return self._folder

    def _header_damaged(self, rng: random.Random) -> None:
        path = self._put(rng) / SINGLE
        whole = path.read_bytes()
        size = 8 + int.from_bytes(whole[:8], "little")
        write(
            path,
            damaged(whole[:size], rng) + whole[size:]
            if rng.random() < 0.8
            else damaged(whole, rng),
        )
        self._tensors_are_read("8: a damaged header", rng)

    def _header_altered(self, rng: random.Random) -> None:
        path = self._put(rng) / SINGLE
        tensors = parsed(path.read_bytes())
        tensors = Tensors(altered(tensors.header, rng), tensors.data)
        write(path, joined(tensors, as_text(tensors.header, rng)))
        self._tensors_are_read("8: an altered header", rng)

    def _tensors_are_read(self, what: str, rng: random.Random) -> None:
        """Usually read the file alone, which is quick."""
        if rng.random() < 0.05:
            self._run(what)
            return

        def read() -> None:
            checkpoint = open_checkpoint(self._folder)
            try:
                for tensor in checkpoint.tensors.values():
                    tensor.read()
            finally:
                checkpoint.close()

        refusal(what, read)

    def _gptq(self, rng: random.Random) -> None:
        folder = self._put(rng, layout=("olmoe", "hub"))
        config = {"bits": 4, "quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False}
        config = altered(config, rng) if rng.random() < 0.3 else config
        write(folder / "quantize_config.json", as_text(config, rng))
        sizes = (rng.choices((0, 1, 4, 32), k=rng.choice((0, 1, 2, 2, 3))) for _ in range(4))
        parts = zip(("qweight", "qzeros", "scales", "g_idx"), sizes, strict=True)
        made = Tensors.of({f"a.{name}": (rng.choice(("I32", "F16")), size) for name, size in parts})
        write(folder / SINGLE, joined(made))
        if rng.random() < 0.3:
            write(folder / INDEX, as_text(altered({"weight_map": {"a": SINGLE}}, rng), rng))

        def read() -> None:
            checkpoint = GptqCheckpoint.open(folder)
            for name in checkpoint.modules():
                checkpoint.read(name)

        refusal("8: a GPTQ checkpoint", read)

    def _gguf_damaged(self, rng: random.Random) -> None:
        path = self._folder.parent / f"{rng.getrandbits(64):x}.gguf"  # headers are kept by name
        header = damaged(self._gguf[: self._gguf_start], rng)
        write(path, header + self._gguf[self._gguf_start :])

        def read() -> None:
            open_gguf(path).close()
            gguf_config(path)
            gguf_shape(path)
            read_vocabulary(path)

        refused = refusal("8: a damaged GGUF header", read)
        path.unlink()
        if refused and not str(refused).isprintable():
            raise Lost(f"8: the refusal of a GGUF header is not one line: {str(refused)!r}")

    def _index(self, rng: random.Random) -> None:
        folder = self._put(rng)
        inside = folder / "model-1.safetensors"
        (folder / SINGLE).rename(inside)
        outside = write(folder.parent / "outside.safetensors", inside.read_bytes())
        weights = {f"t{number}": inside.name for number in range(3)}
        name = rng.choice(
            (
                "../outside.safetensors",
                str(outside),
                INDEX,
                ".",
                "..",
                "",
                "case",
                "config.json",
                "x" * 300,
                "a\0b",
                5,
            )
        )
        index = {"weight_map": weights | ({"t9": name} if rng.random() < 0.5 else {})}
        write(folder / INDEX, as_text(altered(index, rng) if rng.random() < 0.5 else index, rng))

        def opened() -> None:
            checkpoint = open_checkpoint(folder)
            strange = [
                shard.path
                for shard in checkpoint.shards
                if shard.path.parent.resolve() != folder.resolve()
            ]
            checkpoint.close()
            if strange:
                raise Lost(f"21: {strange[0]} was opened from outside the folder")

        refusal("21: an altered index", opened)

    def _config(self, rng: random.Random) -> None:
        self._altered("config.json", rng)
        self._run("21: an altered config")

    def _altered(self, name: str, rng: random.Random) -> Path:
        path = self._put(rng) / name
        return write(path, as_text(altered(json.loads(path.read_bytes()), rng), rng))

    def _number(self, rng: random.Random) -> None:
        path = self._put(rng) / "config.json"
        config = json.loads(path.read_bytes())
        name = rng.choice(
            sorted(name for name, value in config.items() if isinstance(value, int | float | list))
        )
        config[name] = odd(rng) if rng.random() < 0.2 else rng.choice((*NUMBERS, *FRACTIONS))
        write(path, as_text(config, rng))
        self._run(f"21: a config with {name} {config[name]}")

    def _shape(self, rng: random.Random) -> None:
        path = self._altered("config.json", rng)
        refusal("21: the shape of an altered config", lambda: model_shape(str(path)))

    def _texts(self, rng: random.Random) -> None:
        path = self._put(rng) / rng.choice(_TEXTS)
        if rng.random() < 0.5:
            write(path, as_text(altered(json.loads(path.read_bytes()), rng), rng))
        else:
            write(path, damaged(path.read_bytes(), rng))
        self._run(f"12: an altered {path.name}")

    def _missing(self, rng: random.Random) -> None:
        with self._tensors(rng) as tensors:
            name = rng.choice(sorted(tensors))
            del tensors[name]
        if not self._run(f"11: {name} missing"):
            raise Lost(f"11: {name} was missing, and the model ran")

    def _not_finite(self, rng: random.Random) -> None:
        with self._tensors(rng) as tensors:
            name = rng.choice(sorted(tensors))
            kind, shape, data = tensors[name]
            bad = struct.pack("<f", rng.choice((math.nan, math.inf, -math.inf)))
            at = 4 * rng.randrange(len(data) // 4)
            tensors[name] = (kind, shape, data[:at] + bad + data[at + 4 :])
        if not self._run(f"11: {name} not finite", is_whole=True):
            raise Lost(f"11: {name} was not finite, and the model ran")

    def _reshaped(self, rng: random.Random) -> None:
        with self._tensors(rng) as tensors:
            several = [name for name, (_, shape, _) in tensors.items() if len(shape) > 1]
            name = rng.choice(sorted(several))
            kind, shape, data = tensors[name]
            other = rng.choice(([shape[0] * shape[1], *shape[2:]], [1, *shape], [*reversed(shape)]))
            tensors[name] = (kind, other, data)
        if not self._run(f"11: {name} of another shape") and other != shape:
            raise Lost(f"11: {name} had shape {other} instead of {shape}, and the model ran")

    @contextmanager
    def _tensors(self, rng: random.Random) -> Iterator[dict[str, tuple]]:
        """The tensors of a fresh checkpoint, which are written back as they are left."""
        path = self._put(rng) / SINGLE
        tensors = parsed(path.read_bytes()).taken_apart()
        yield tensors
        write(path, joined(Tensors.together(tensors)))

    def _run(self, what: str, *, is_whole: bool = False) -> BadInput | None:
        """Open it and decode a token; with `is_whole`, read every expert first."""
        return refusal(what, lambda: _token(self._folder, is_whole=is_whole))


def _token(folder: Path, *, is_whole: bool) -> None:
    opened = open_model(str(folder))
    try:
        if is_whole:
            _read_all(opened)
        if opened.tokenizer is not None:
            opened.tokenizer("a b")
        with Session(opened, Settings(budget="100%", link="disk", window="0B")) as session:
            session.forward(_PROMPT)
    finally:
        opened.store.close()


def _read_all(opened: MoeModel) -> None:
    buffer = aligned(opened.store.layout.nbytes)
    for key in range(opened.shape.num_keys):
        opened.store.read(*divmod(key, opened.shape.num_experts), buffer)
