"""Faults of links, memory and cancellation while a session runs: the next request is exact and
nothing leaks."""

import random
from pathlib import Path

import torch

from tools.torments import cancellations, resource_faults
from tools.torments.engine_case import EngineCase, Fault
from tools.torments.engine_checks import Held
from tools.torments.lossless import Models

_LONG = "17: a thousand requests"
_FAULTS: dict[str, Fault] = {
    "17: a transfer fails": resource_faults.transfer_fails,
    "17: an issue fails": resource_faults.issue_fails,
    "17: many transfers fail": resource_faults.everything_fails,
    "17: slow and reordered": resource_faults.slow_and_reordered,
    "17: stuck": resource_faults.stuck,
    "17: out of memory": resource_faults.out_of_memory,
    "17: no memory for a session": resource_faults.building_fails,
    _LONG: resource_faults.many,
    "18: interrupted": cancellations.interrupted,
    "18: attention fails": cancellations.attention_fails,
    "18: generation closed": cancellations.generation_closed,
    "18: session closed": cancellations.session_closed,
    "18: threads": cancellations.threads,
    "18: in turns": cancellations.in_turns,
    "18: a row given up": cancellations.row_aborted,
}
_WEIGHTS = [0.1 if name == _LONG else 2 if "interrupted" in name else 1 for name in _FAULTS]


class EngineFaults:
    """Failing, stalling and reordering links, failing allocations, interruptions at any
    instruction, closed generations and threads, over every lossless preset."""

    classes = (17, 18)
    share = 4.0

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        self._models = Models(ground)
        model = self._models.draw(random.Random(0))
        for (
            name,
            fault,
            # imports and compiles everything that stays, before resources are counted
        ) in _FAULTS.items():
            if name != _LONG:
                EngineCase(model, random.Random(0)).run(name, fault)

    def one(self, rng: random.Random) -> str:
        case = EngineCase(self._models.draw(rng), rng)
        name = rng.choices(list(_FAULTS), weights=_WEIGHTS)[0]
        before = Held.now()
        case.run(name, _FAULTS[name])
        Held.now().check(before, f"{name} ({case.told})")
        return name
