"""Distance of trellis codes from the limit on Gaussian numbers, and the time that an expert takes
beside GPTQ.

    python -m tools.bench.quality.encoding [--model FOLDER] [--write docs/quantisation.md]
    python -m tools.bench.quality.encoding --model FOLDER --experts 6144 [--write docs/quantisation.md]

Recipes take turns in rounds; a round is one expert at all widths with random inputs, on one thread.
Times are of the processor. `--experts N` scales the time of one expert of FOLDER to N experts;
FOLDER itself may have fewer.
"""

from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
import torch

from artifacts.quantisation.trellis.trellis_encoder import Encoder
from artifacts.quantisation.widths import TRELLIS_WIDTHS
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from profilers.quantise.estimate import expert_s
from profilers.quantise.method import TRELLIS, Method
from tools.arguments import parser_of
from tools.bench.performance import Section, Table, publish

SHAPE = (2048, 64)
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}
METHODS = (Method(recipe="plain"), Method(), Method(recipe=TRELLIS, bits=(1, 2, 3, 4)))


def distortion(bits: float) -> tuple[float, float]:
    """Bits a weight in all, and the mean squared error of numbers of variance 1."""
    weight = np.random.default_rng(0).standard_normal(SHAPE)
    coded = Encoder(weight, np.eye(SHAPE[1])[None], rotates_outputs=True, damp=0.01).at(bits)
    error = weight - coded.dequantised().numpy()
    return 8 * coded.nbytes / weight.size, float(np.square(error).mean() / np.square(weight).mean())


def distortions() -> Table:
    rows = []
    for width in TRELLIS_WIDTHS:
        bits, error = distortion(width + 0.005)  # scales of so small a matrix count
        rows.append(
            (f"{bits:.3f}", f"{error:.4f}", f"{LLOYD_MAX.get(width, '')}", f"{4.0**-bits:.4f}")
        )
    note = f"a matrix of {SHAPE[0]} x {SHAPE[1]} normal numbers, seed 0, outputs rotated"
    columns = ("bits a weight", "mean squared error", "best scalar code", "limit")
    return Table("Distortion of Gaussian numbers", columns, rows, note)


def times(name: str, *, rounds: int, tokens: int) -> Table:
    """Processor milliseconds of one expert and width, medians, and their ratio to GPTQ's recipe
    `refined`."""
    opened = open_quietly(name, device="cpu")
    taken = [
        [
            expert_s(opened, method, tokens, clock=process_time) / len(method.bits)
            for method in METHODS
        ]
        for _ in range(rounds)
    ]
    rows = [
        (method.recipe, f"{1e3 * median(own):.0f}", f"{median(np.divide(own, gptq)):.2f}")
        for method, own, gptq in zip(
            METHODS, np.transpose(taken), [np.transpose(taken)[1]] * len(METHODS), strict=True
        )
    ]
    shapes = ", ".join(
        f"{rows_} x {columns}" for rows_, columns in opened.layers[0].shapes.values()
    )
    note = (
        f"experts of {shapes}, a text of {tokens:,} tokens, four widths, losses included, medians "
        f"of {rounds} rounds"
    )
    return Table("Time of an expert and width", ("recipe", "ms", "ratio to refined"), rows, note)


def hours(name: str, num_experts: int, *, tokens: int) -> Table:
    """Processor seconds of one expert at the widths that each recipe makes unasked, and hours of
    all on two cores."""
    opened = open_quietly(name, device="cpu")
    rows = []
    for method in (Method(), Method(recipe=TRELLIS, bits=TRELLIS_WIDTHS)):
        seconds = expert_s(opened, method, tokens, clock=process_time)
        all_h = seconds * num_experts / 3600
        rows.append(
            (method.recipe, len(method.bits), f"{seconds:.1f}", f"{all_h:.1f}", f"{all_h / 2:.1f}")
        )
    own = tokens * opened.shape.top_k // opened.shape.num_experts
    shapes = ", ".join(
        f"{rows_} x {columns}" for rows_, columns in opened.layers[0].shapes.values()
    )
    note = (
        f"experts of {shapes}, a text of {tokens:,} tokens, {own:,} of them the expert's own, "
        "losses included"
    )
    columns = (
        "recipe",
        "widths",
        "s an expert",
        f"h, {num_experts:,} experts on one core",
        "on two",
    )
    return Table("Time of all experts", columns, rows, note)


def main() -> None:
    options = parser_of(
        __doc__,
        model=(str, "folder of the model; else the bundled one"),
        rounds=5,
        tokens=48000,
        experts=(int, "how many the model has: says the hours of all"),
        write=Path,
    ).parse_args()
    torch.set_num_threads(1)
    name = options.model or str(demo_model())
    command = "python -m tools.bench.quality.encoding"
    if options.experts:
        tables = [hours(name, options.experts, tokens=options.tokens)]
        command += f" --model MODEL --experts {options.experts} --tokens {options.tokens}"
    else:
        tables = [distortions(), times(name, rounds=options.rounds, tokens=options.tokens)]
    section = Section("encoding-hours" if options.experts else "encoding", tables)
    publish(section, options.write, command)


if __name__ == "__main__":
    main()
