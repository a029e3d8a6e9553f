"""Context-aware MoE on CXL GPU-NDP systems: decoding, NDP side and end to end over MoNDE and
HOBBIT, by its text."""

from pathlib import Path

import numpy as np

from artifacts.hardware.machines import Machine, machine
from artifacts.modelshapes.known import MODELS
from artifacts.quantisation.replicas import typical
from moectl.show.render import Sheet
from tools.reproductions.contextaware import figures as paper
from tools.reproductions.contextaware.claims import NEAR, claims, likeness_sheet
from tools.reproductions.contextaware.systems import (
    DIALS,
    HOBBIT,
    LENGTHS,
    MACHINE,
    NOTHING,
    NUM_LAYERS,
    STATIC,
    SWAPS,
    Measured,
    gpu_gb,
    measure,
)
from tools.reproductions.judged import SEEDS
from tools.reproductions.recorded import Recorded
from tools.reproductions.report import Reproduction


def reproduce(trace: Path | None = None) -> Reproduction:
    """Predict the speed-ups; the rate at which MoNDE swaps is fitted to one printed figure of each
    model. What the paper says of routing is measured on recorded routing, the bundled and that of
    `trace`."""
    device = machine(MACHINE)
    each = [{name: measure(name, device, seed) for name in paper.MODELS_MEASURED} for seed in SEEDS]
    measured = each[0]
    recorded = [Recorded.read(), *([] if trace is None else [Recorded.read(trace)])]
    return Reproduction(
        name="context-aware",
        paper="Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems (2025)",
        sheets={
            "speedups": _speedups(measured),
            "swaps": _swaps(measured),
            "end_to_end": _end_to_end(measured),
            "memory": _memory(device),
            "likeness": likeness_sheet(recorded),
            "accuracy": _accuracy(),
        },
        claims=claims(each, device, recorded),
        assumed=(*_assumed(measured), *(one.told for one in recorded)),
    )


def _speedups(measured: dict[str, Measured]) -> Sheet:
    rows = []
    for name, one in measured.items():
        for measure_name, printed, ratio in (
            ("decoding", paper.DECODING, one.decoding),
            ("NDP side", paper.NDP_SIDE, one.near),
        ):
            for bits in paper.BITS:
                is_fitted = (measure_name, bits) == ("decoding", 3)
                ratios = (ratio(bits, one.rivals[rival]) for rival in (STATIC, NOTHING, SWAPS))
                last = "fitted" if is_fitted else "predicted"
                rows.append((name, measure_name, bits, str(printed[name, bits]), *ratios, last))
    columns = (
        "model",
        "speed-up of",
        "average bits",
        "paper",
        *map(_over, (STATIC, NOTHING, SWAPS)),
        "the last is",
    )
    return Sheet("Over MoNDE, hot experts in place (5.2, Figures 5 and 6)", columns, rows)


def _over(rival: str) -> str:
    return f"over {rival}"


def _swaps(measured: dict[str, Measured]) -> Sheet:
    rows = []
    for name, one in measured.items():
        for rate, monde in sorted({**one.by_rate, one.rate: one.rivals[SWAPS]}.items()):
            ratios = (
                ratio(bits, monde) for ratio in (one.decoding, one.near) for bits in paper.BITS
            )
            waits = 1 - one.by_rate[0.0].token_s / monde.token_s
            rows.append(
                (name, rate, *ratios, waits, "fitted to 3 bits" if rate == one.rate else "")
            )
    columns = (
        "model",
        "swapped a layer and token",
        *(f"{what}, {bits} bits" for what in ("decoding", "NDP side") for bits in paper.BITS),
        "share of MoNDE's time for swapping",
        "rate",
    )
    return Sheet(
        "Over a MoNDE that swaps on demand, by its rate, which is not printed (2.2, 5.2)",
        columns,
        rows,
    )


def _end_to_end(measured: dict[str, Measured]) -> Sheet:
    rows = []
    for name, one in measured.items():
        for bits in paper.BITS:
            ours = one.ours[bits]
            for num_tokens in LENGTHS:
                ratios = (one.end_to_end(bits, rival, num_tokens) for rival in one.rivals.values())
                parts = (ours.ttft_s, ours.migration_s, num_tokens * ours.token_s)
                rows.append(
                    (name, bits, num_tokens, str(paper.END_TO_END[name, bits]), *parts, *ratios)
                )
    rivals = next(iter(measured.values())).rivals
    columns = (
        "model",
        "average bits",
        "decoded tokens",
        "paper",
        "TTFT s",
        "migration s",
        "decoding s",
        *map(_over, rivals),
    )
    return Sheet("End to end: TTFT + migration + n * TPOT (5.2, Figure 5)", columns, rows)


def _memory(device: Machine) -> Sheet:
    rows = []
    for name in paper.MODELS_MEASURED:
        shape = MODELS[name].shape
        hot = paper.HOT[name]
        sizes = typical(np.ones((1, 1)), expert_nbytes=shape.expert_nbytes).nbytes
        near = shape.num_keys * sum(sizes.values()) / 1e9
        most = max(
            count for count in range(shape.num_experts + 1) if gpu_gb(name, count) <= device.fast_gb
        )
        rows.append((name, hot, gpu_gb(name, hot), device.fast_gb, most, near, device.near_gb))
    columns = (
        "model",
        "hot experts a layer",
        "GPU GB",
        "GPU has GB",
        "as many would fit",
        "NDP GB with all replicas",
        "NDP has GB",
    )
    return Sheet("Memory (Tables 1 and 2, 5.1), without attention cache", columns, rows)


def _accuracy() -> Sheet:
    rows = [
        (
            name,
            str(average),
            sum(tasks) / len(tasks),
            paper.TABLE_3["original"][1] - average,
            *tasks,
        )
        for name, (tasks, average) in paper.TABLE_3.items()
    ]
    columns = ("method", "paper", "mean of the eight", "drop", *paper.TASKS)
    return Sheet(
        "Table 3, Mixtral-8x7B, carried over; nothing of it is measured here", columns, rows
    )


def _assumed(measured: dict[str, Measured]) -> tuple[str, ...]:
    rates = ", ".join(f"{one.rate:.3f} for {name}" for name, one in measured.items())
    return (
        f"virtual time on a synthetic trace, {DIALS}: uses in prefill and decoding have a cosine "
        "of .89, as the paper reports. Skew, locality, lengths and requests at a time are not "
        "printed",
        f"{NUM_LAYERS} layers of each model, with their share of the head, times are those of "
        "all; layers of a synthetic trace are alike",
        f"{MACHINE}: Table 2, and of the H100 with 132 SMs and HBM3 the data sheet's 3.35 TB/s; "
        "25 GB/s over PCIe 4.0 x16; a unit of 4 x 4 does 16 multiply-adds a cycle in 16 bits, "
        "and as many times more as bits are fewer (2.3)",
        (
            "replicas in groups of 128, their scales and zero-points read as well: 3.15 and 2.14 "
            "bits a weight"
        ),
        "prompts: experts that are absent come over the link in every system; where the paper's "
        "prompts run is not printed",
        "MoNDE: with the same experts on the GPU; keeping nothing, which with one request at a "
        "time fetches nothing either; and swapping on demand from what the prompt left, at a "
        f"rate fitted to the paper's throughput at 3 bits ({rates} experts a layer and token). "
        "The paper does not say which of them it compares with",
        f"{HOBBIT}: the preset on experts of 16 bits, in as much GPU memory as ours, predictions "
        "right seven times of ten; which precisions, cache and predictions the paper gave it is "
        "not printed",
        f"a figure agrees that is within {NEAR:.0%} of the printed one",
        (
            "not charged: activations over the link (16 KB a layer and token), the attention "
            "cache, launches"
        ),
    )
