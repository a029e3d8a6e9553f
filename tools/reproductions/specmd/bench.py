"""SpecMD's conditions: its four shapes at an expert's bits, their traces by seed, and budgets in
per cent of the bytes at 16 bits."""

from dataclasses import replace
from functools import cache

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import MODELS, ModelShape
from artifacts.shape import FULL_BITS
from artifacts.traces.synthetic import Dials, generate
from runtime.replay.workload import Workload

# Experts of 4 bits that 5 GB/s move in the time that a layer takes by Table 1, tokens/s of config
# 5.
LAYER_EXPERTS = {
    "olmoe-1b-7b": 62.0,
    "mixtral-8x7b": 1.3,
    "phi-3.5-moe": 3.8,
    "qwen1.5-moe-a2.7b": 24.0,
}
# `moectl fit-trace` on a trace of the bundled model on held-out text; prompts as questions of the
# paper's tasks have.
DIALS = Dials(
    skew=1.4, locality=0.0, similarity=0.94, predictability=0.8, grading=0.88, tokens=96, requests=2
)
MACHINE = "a100-pcie4"
LINK_GBPS = 5.0
FEW = 4  # bits of an expert in Tables 1 and 2


@cache
def workload(name: str, bits: int, seed: int = 0) -> Workload:
    """Return the workload of a shape with experts of `bits` bits, on the trace of a seed."""
    model = _at_bits(MODELS[name], bits)
    window = int(LAYER_EXPERTS[name] * MODELS[name].shape.expert_nbytes * FEW / FULL_BITS)
    return Workload(
        generate(replace(DIALS, seed=seed), model.shape),
        model,
        replace(machine(MACHINE), link_gbps=LINK_GBPS),
        window=window,
    )


def _at_bits(model: ModelShape, bits: int) -> ModelShape:
    shape = replace(model.shape, expert_nbytes=model.shape.expert_nbytes * bits // FULL_BITS)
    return replace(model, shape=shape, weight_nbytes=model.weight_nbytes * bits / FULL_BITS)


def num_held(name: str, bits: int, budget: int) -> int:
    """Return the experts that the budget holds."""
    return MODELS[name].shape.num_keys * budget * FULL_BITS // (100 * bits)
