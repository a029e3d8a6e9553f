"""The model of probes of whole tokens: some layers of OLMoE's size, all experts in RAM once for all
sessions."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from runtime.model.open import MoeModel, open_model
from runtime.session.settings import Settings
from runtime.tiers.ram import RamStore
from tools.gpu import models
from tools.gpu.packages import experts_by


@contextmanager
def small_olmoe(
    options: argparse.Namespace, *, layers: int, length: int
) -> Iterator[tuple[MoeModel, np.ndarray]]:
    """Yield a model of `layers` layers with random weights on the device of the options, and a text
    of `length` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        models.save(
            models.SHAPES["olmoe-1b-7b"],
            Path(folder),
            layers=layers,
            device=options.device,
            tiny=options.tiny,
        )
        opened = open_model(folder, device=torch.device(options.device))
        (ids,) = models.texts(opened.config.vocab_size, count=1, length=length)
        yield replace(opened, store=RamStore(opened.store, pin=options.device != "cpu")), ids
        opened.store.close()


def settings_of(device: str, preset: str = "on-demand", **own: object) -> Settings:
    """Settings at a quarter of the experts, over the machine's link, or an emulated one without a
    GPU."""
    link = "auto" if device != "cpu" else "1GB/s"
    return Settings(preset, budget="25%", link=link, experts=experts_by(device), **own)
