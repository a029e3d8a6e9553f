"""The session as batches see it, which is no import: a session imports them."""

from collections.abc import Callable
from typing import Protocol

import torch

from runtime.control.controller import Controller
from runtime.engine.engine import Engine
from runtime.model.kv_cache import KvCoding
from runtime.model.open import MoeModel
from runtime.session.generation.charges import Charge
from runtime.session.generation.drafted import DraftVerifier
from runtime.session.generation.finite import NotFinite
from runtime.session.generation.sampling import Sampler, Sampling
from runtime.session.generation.single import Drawn, Generation
from runtime.session.parts import Parts


class PassRunner(Protocol):
    """Part of a `Session` that runs passes; its methods are described there."""

    opened: MoeModel
    parts: Parts
    controller: Controller
    engine: Engine
    kv_coding: KvCoding | None
    verifier: DraftVerifier | None
    fallbacks: list[str]
    num_passes: int
    forward_rows: Callable[..., object]
    begin: Callable[..., Generation]
    step: Callable[[Generation], tuple[list[Drawn], Charge]]
    sampler: Callable[[torch.Tensor, Sampling], Sampler]
    new_requests: Callable[[int], int]
    charge_since: Callable[..., Charge]
    traced: Callable[[NotFinite], NotFinite]
