"""Context-aware MoE on CXL GPU-NDP systems, Figures 5 and 6: decoding with near experts at few bits, over MoNDE."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts.hardware.costs import Costs
from artifacts.hardware.machines import Machine, machine
from artifacts.modelshapes.known import MODELS, ModelShape
from artifacts.quantisation.replicas import typical
from artifacts.shape import FULL_BITS
from artifacts.traces.synthetic import Dials, generate
from moectl.reproductions.report import UNKNOWN, Claim, Reproduction
from moectl.show.render import Sheet
from runtime.policies.presets import Scope
from runtime.replay.settings import Outcome, Setting
from runtime.replay.workload import Workload

NAMES, MACHINE = ("mixtral-8x7b", "mixtral-8x22b"), "h100-cxl-ndp"
SHARES, BITS, BATCHES = (0.125, 0.25, 0.5), (3, 2), (4, 16)
# By average bits: the range of the end-to-end figures, and approximate figures of the NDP side alone.
PAPER_WHOLE, PAPER_NEAR = {3: (6.6, 8.7), 2: (7.9, 11.5)}, {3: 5.0, 2: 8.0}
# With these, uses in prefill and in decoding have a cosine of .88; the paper reports .89 (Mixtral-8x7B, TruthfulQA).
DIALS = Dials(skew=0.8, locality=0.0, similarity=0.3, tokens=576, requests=1, prompt=64)
_NUM_LAYERS = 4
_NEAR = 0.1
# MoNDE as published: it fetches the experts of a step that arrive while the near tier computes the others.
_KEEPS_NOTHING = "MoNDE keeping nothing"


@dataclass(frozen=True, slots=True)
class Speedups:
    """Speed-ups of context-aware over MoNDE: of a token's whole time, and of its time on the near tier.

    The first two compare with a MoNDE that keeps the same experts on the GPU, the others with one that keeps none.
    """

    whole: float
    near: float
    whole_over_nothing: float
    near_over_nothing: float


SpeedupTable = dict[tuple[str, float, int], Speedups]  # keys: model, share on the GPU, average bits


def reproduce() -> Reproduction:
    """Predict the speed-ups; no parameter is fitted to the paper's."""
    table_2 = machine(MACHINE)
    by_memory = replace(table_2, near_tflops=math.inf)
    speedups, unbound = (_speedups(device) for device in (table_2, by_memory))
    return Reproduction(
        name="context-aware",
        paper="Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems (2025), Figures 5 and 6: decoding over MoNDE",
        sheets={
            "ranges": _ranges(speedups, unbound),
            "settings": _settings(speedups, unbound),
            "batches": _batches(table_2, by_memory),
        },
        claims=_claims(speedups, unbound, by_memory),
        assumed=(*_assumed(), *_reasons(table_2)),
    )


def layers_of(name: str) -> ModelShape:
    """A model cut to a few layers, with a proportional share of its head."""
    model = MODELS[name]
    vocabulary = round(model.vocabulary * _NUM_LAYERS / model.shape.num_layers)
    return replace(model, shape=replace(model.shape, num_layers=_NUM_LAYERS), vocabulary=vocabulary)


def _speedups(device: Machine) -> SpeedupTable:
    speedups: SpeedupTable = {}
    for name in NAMES:
        workload = _workload(name, device, DIALS)
        nothing = workload.run(_keeping_nothing(device))
        for share in SHARES:
            speedups |= {(name, share, bits): one for bits, one in _compared(workload, nothing, share).items()}
    return speedups


def _workload(name: str, device: Machine, dials: Dials) -> Workload:
    model = layers_of(name)
    return Workload(generate(dials, model.shape, detailed=False), model, device)


def _compared(workload: Workload, nothing: Outcome, share: float) -> dict[int, Speedups]:
    """Speed-ups by average bits."""
    budget = f"{share * 100}%"
    monde = workload.run(Setting("monde", "monde", budget=budget))
    compared = {}
    for bits in BITS:
        policies = {"residency": f"hot:avg_bits={bits}"}
        ours = workload.run(Setting("context-aware", "context-aware", policies, budget=budget))
        compared[bits] = Speedups(
            *(_ratio(over, ours, which) for over in (monde, nothing) for which in ("tpot_ms", "near_ms"))
        )
    return compared


def _keeping_nothing(device: Machine) -> Setting:
    miss = f"qstar:ratio={device.link_gbps / device.near_gbps:.4f}"
    return Setting(_KEEPS_NOTHING, policies={"miss": miss}, scope=Scope.GLOBAL, budget="2x")


def _ratio(over: Outcome, ours: Outcome, which: str) -> float:
    return over.times[which] / ours.times[which]


def _ranges(speedups: SpeedupTable, unbound: SpeedupTable) -> Sheet:
    rows = []
    for bits in BITS:
        for measure, paper in (("whole", _between(PAPER_WHOLE[bits])), ("near", _about(PAPER_NEAR[bits]))):
            fields = (measure, f"{measure}_over_nothing")
            columns = (_of(one, bits, field) for one in (speedups, unbound) for field in fields)
            rows.append((bits, _MEASURES[measure], paper, *map(_between, columns)))
    keeps = f"over {_KEEPS_NOTHING}"
    columns = ("average bits", "speed-up", "paper", "ours", keeps, "NDP bound by memory alone", f"that {keeps}")
    return Sheet("Decoding, context-aware over MoNDE, least and greatest", columns, rows)


_MEASURES = {"whole": "end to end", "near": "NDP side alone"}


def _settings(speedups: SpeedupTable, unbound: SpeedupTable) -> Sheet:
    rows = [
        (*key, UNKNOWN, one.whole, one.near, unbound[key].whole, unbound[key].near) for key, one in speedups.items()
    ]
    columns = ("model", "share on the GPU", "average bits", "paper", *_END_AND_NEAR)
    return Sheet("By model and share of experts on the GPU", columns, rows)


_END_AND_NEAR = ("end to end", "NDP side", "end to end, by memory alone", "NDP side, by memory alone")


def _batches(*devices: Machine) -> Sheet:
    rows = []
    for batch in BATCHES:
        dials = replace(DIALS, tokens=DIALS.length * batch, requests=batch, batch=batch)
        both = [_in_batch(device, dials) for device in devices]
        rows += [
            (batch, bits, UNKNOWN, *(figure for one in both for figure in (one[bits].whole, one[bits].near)))
            for bits in BITS
        ]
    columns = ("requests at a time", "average bits", "paper", *_END_AND_NEAR)
    return Sheet(f"Requests decoded together, {NAMES[0]}, {SHARES[1]:g} on the GPU", columns, rows)


def _in_batch(device: Machine, dials: Dials) -> dict[int, Speedups]:
    workload = _workload(NAMES[0], device, dials)
    return _compared(workload, workload.run(_keeping_nothing(device)), SHARES[1])


def cold_expert(device: Machine, bits: int) -> float:
    """Time of one expert on the near tier at full precision over its time at `bits`, for one token."""
    model = MODELS[NAMES[0]]
    near, nbytes = (
        Costs.of(model, device).near,
        typical(np.ones((1, 1)), expert_nbytes=model.shape.expert_nbytes).nbytes,
    )
    return near.seconds(1) / near.seconds(1, share=nbytes[bits] / nbytes[FULL_BITS])


def _claims(speedups: SpeedupTable, unbound: SpeedupTable, by_memory: Machine) -> tuple[Claim, ...]:
    claims = []
    for bits in BITS:
        low, high = PAPER_WHOLE[bits]
        ours = _of(speedups, bits, "whole")
        is_within = low <= min(ours) and max(ours) <= high
        claims.append(Claim(f"end to end, {bits} bits", _between((low, high)), _between(ours), is_within))
        paper = PAPER_NEAR[bits]
        for what, ours in (
            ("NDP side", _of(speedups, bits, "near")),
            ("NDP side, by memory alone", _of(unbound, bits, "near")),
            ("one cold expert, by memory alone", [cold_expert(by_memory, bits)]),
        ):
            is_near = all(abs(figure / paper - 1) <= _NEAR for figure in ours)
            claims.append(Claim(f"{what}, {bits} bits", _about(paper), _between(ours), is_near))
    whole = {bits: _of(speedups, bits, "whole") for bits in BITS}
    is_faster = all(two > three * 1.01 for two, three in zip(whole[2], whole[3], strict=True))
    claims.append(Claim("2 bits are faster than 3", "yes", "yes" if is_faster else "no", is_faster))
    is_more = all(one.whole > one.near for one in speedups.values())
    claims.append(Claim("more end to end than on the NDP side", "yes", "yes" if is_more else "no", is_more))
    return tuple(claims)


def _of(speedups: SpeedupTable, bits: int, measure: str) -> list[float]:
    return [getattr(one, measure) for key, one in speedups.items() if key[2] == bits]


def _between(figures: Sequence[float]) -> str:
    low, high = (f"{end(figures):.1f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _about(figure: float) -> str:
    return f"about {figure:g}"


def _assumed() -> tuple[str, ...]:
    return (
        f"a synthetic trace, {DIALS}: uses in prefill and decoding have a cosine of .88; the paper reports .89 of "
        "Mixtral-8x7B on TruthfulQA. Skew, locality, lengths and requests at a time are not available here",
        f"{_NUM_LAYERS} layers of each model, with their share of the head; layers of a synthetic trace are alike",
        "GPU memory of the paper is not available here: shares of the experts' bytes are tried instead; an H100 of "
        "80 GB would hold most of Mixtral-8x7B",
        f"{MACHINE} as Table 2 and data sheets say: H100 PCIe, 25 GB/s over the link, NDP 512 GB/s; a unit of 4 x 4 "
        "does 16 multiply-adds a cycle, so that 64 at 1 GHz do 2.048 Tflop/s at any width",
        "replicas in groups of 128, their scales and zero-points read as well: 3.15 and 2.14 bits a weight",
        "MoNDE: the preset monde, with the same experts on the GPU as context-aware. A MoNDE that keeps nothing there "
        "fetches, of the experts of each step, those that arrive while the NDP computes the others: here that is none",
        "which figure of the paper belongs to which model is not available here, only the ranges over both",
    )


def _reasons(device: Machine) -> tuple[str, ...]:
    """Reasons for differences from the paper's figures."""
    costs = Costs.of(MODELS[NAMES[0]], device)
    unbound = replace(device, near_tflops=math.inf)
    full, one_token, three_bits, dense, hot = (
        f"{seconds * 1e3:.3f} ms"
        for seconds in (
            costs.near.memory_s,
            costs.near.token_s,
            costs.near.memory_s / cold_expert(unbound, 3),
            costs.rest.memory_s,
            costs.expert.memory_s,
        )
    )
    ratios = ", ".join(f"{cold_expert(unbound, bits):.1f} at {bits} bits" for bits in BITS)
    return (
        f"arithmetic bounds the NDP at few bits: it reads an expert of {NAMES[0]} in {full} in 16 bits and in "
        f"{three_bits} in 3, but computes it in {one_token} for each token, so that no width gains more than "
        f"{cold_expert(device, 1):.1f} times, and less where an expert has several tokens. The paper's 5 and 8 are the "
        f"ratios of bytes ({ratios}): its NDP must do more than we read in Table 2",
        f"the GPU's part is the same for both: {dense} a layer beside its experts, and a hot expert in 16 bits takes "
        f"{hot} there, longer than a cold one in 3 bits takes to be read on the NDP; the more is kept on the GPU, the "
        "less there is to gain",
        "hot experts come over the link while the first tokens are decoded, and until then the NDP computes them in 16 "
        "bits: that keeps its ratio below that of bytes, most where much is kept",
        "the paper gains more end to end than on the NDP side, which the same placement cannot give: its MoNDE must "
        "compute more experts near, or wait for the link. Over a MoNDE that keeps nothing, with both bound by memory "
        "alone, the NDP side spans about the paper's ranges; end to end stays below them, for the GPU's part",
    )
