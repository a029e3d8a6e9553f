"""`moectl quantize`: make replicas of every expert at a few bits and measure their loss, into files
and the store."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.errors import BadUsage
from moectl.bundled import demo_model
from moectl.cli.groups import fill
from moectl.cli.options import Data, Device, Executor, Json, Model, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from artifacts.quantisation.widths import Width
    from moectl.show.render import Sheet
    from profilers.quantise.method import Method
    from moectl.shared.terminal.progress import Phases
    from profilers.quantise.replicas import BuiltReplicas
    from profilers.text.batches import Data as TextData
    from runtime.model.open import MoeModel

_LONG_S = 1800.0  # of all experts on one core, above which the quick recipe is named
COSTS = {
    "trellis": "",
    "refined": (
        "; recipe refined: a quarter to a seventh of trellis' time, and more loss at up to 3 bits"
    ),
    "plain": "; recipe plain: GPTQ as published, for comparison; trellis and refined lose less",
}


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The widths, the method, and the text to calibrate on."""

    bits: Annotated[
        str | None,
        typer.Option(
            help=(
                "Widths of the replicas: 0.6 to 4 (else all of trellis'); of GPTQ's 1, 2, 3, "
                "4 and 8 (else 1,2,3,4)."
            ),
            show_default=False,
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Of GPTQ: inputs that share a scale; 128, 64 and 32 give way where they do "
                "not divide."
            ),
            show_default="128",
        ),
    ] = None
    samples: Annotated[int, typer.Option(min=1, help="Sequences of text to calibrate on.")] = 128
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence, at most.")] = 512
    recipe: Annotated[
        str | None,
        typer.Option(
            help="trellis: least loss (8 bits: refined). Quick: refined, GPTQ in 1/4 to 1/7 of the "
            "time, which loses several times as much in few bits; plain, GPTQ as published.",
            show_default="trellis",
        ),
    ] = None
    damp: Annotated[
        float, typer.Option(help="Added to the Hessian's diagonal, as a share of its mean.")
    ] = 0.01
    min_samples: Annotated[
        int,
        typer.Option(
            min=0, help="Experts with fewer tokens of their own are judged on their layer's."
        ),
    ] = 64
    data: Data = "builtin"
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Experts at a time, each in a process of one thread; else one a core."
        ),
    ] = None
    executor: Executor = "local"
    device: Device = "auto"


def quantize(
    *,
    model: Model = None,
    options: QuantizeOptions,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Make low-bit replicas of experts, and measure each.

    Stopped half-way, the same command goes on.
    """
    with importing():
        from profilers.quantise.method import Method
        from profilers.workers.choose import check_executor

    bits, recipe = parse_bits(options.bits, options.recipe, group_size=options.group_size)
    group_size = options.group_size or Method().group_size
    method = fill(Method, options, bits=bits, recipe=recipe, group_size=group_size)
    check_executor(options.executor)
    built = make_replicas(model, method, options, seed=seed, store=store)
    _show(built, as_json=json)


def _show(built: "BuiltReplicas", *, as_json: bool) -> None:
    """Print the loss of each width, layer by layer, or one JSON object."""
    from moectl.show.render import show_json, show_sheet

    sheet = _layer_sheet(built)
    if as_json:
        summary = {
            "run": built.run_id,
            "tokens": built.num_tokens,
            "seconds": built.seconds,
            "recipe": built.recipe,
        }
        summary |= {"experts": len(built.records), "resumed_experts": built.resumed}
        summary |= {
            "remade_experts": built.remade,
            "borrowing": _num_borrowed(built),
            "skipped": built.skipped,
        }
        summary |= {"shortfall": built.shortfall}
        show_json(
            summary
            | {"folder": str(built.folder), "bytes": _nbytes(built), "layers": sheet.records()}
        )
        return
    show_sheet(sheet)


def parse_bits(
    text: str | None, recipe: str | None, *, group_size: int | None = None
) -> tuple[tuple["Width", ...], str]:
    """Return the widths of a text such as `1,1.5,2`, rising, and the recipe.

    `text` None stands for the usual widths of the recipe. Without a named recipe it is trellis
    codes, which lose least, unless a group size or some of the widths are GPTQ's alone. Raises
    BadUsage for anything but numbers, and for trellis codes with a group size.
    """
    from artifacts.quantisation import gptq
    from artifacts.quantisation.widths import (
        SCALAR_WIDTHS,
        TRELLIS_WIDTHS,
        USUAL_WIDTHS,
        as_width,
    )
    from profilers.quantise.method import REFINED, TRELLIS

    if group_size is not None:
        if recipe == TRELLIS:
            raise BadUsage(
                "trellis codes have no groups: leave out --group-size, or give --recipe refined"
            )
        recipe = recipe or REFINED
    if text is None:
        return (USUAL_WIDTHS if recipe in gptq.RECIPES else TRELLIS_WIDTHS), recipe or TRELLIS
    try:
        bits = tuple(sorted({as_width(part) for part in text.split(",")}))
    except ValueError as error:
        raise BadUsage(
            f"bits {text!r} are not understood: write widths with commas, as 2,4"
        ) from error
    is_scalar = not {*bits} <= {*TRELLIS_WIDTHS} and {*bits} <= {*SCALAR_WIDTHS}
    return bits, recipe or (REFINED if is_scalar else TRELLIS)


@resumable("finished experts are kept")
def make_replicas(
    name: str | None, method: "Method", options: QuantizeOptions, *, seed: int = 0, store: Path
) -> "BuiltReplicas":
    """Quantise the model `name`, a folder or hub id (None: the bundled one)."""
    from moectl.shared.terminal.progress import Phases
    from moectl.shared.stores import check_store
    from profilers.text.corpus import documents

    name = name or str(demo_model())
    check_store(store)
    documents(options.data)  # a wrong path is reported before a model is opened
    with Phases(1, 1, 38) as phases:
        return _quantize(name, method, options, phases, seed=seed, store=store)


def _quantize(
    name: str,
    method: "Method",
    options: QuantizeOptions,
    phases: "Phases",
    *,
    seed: int,
    store: Path,
) -> "BuiltReplicas":
    from moectl.shared.opening import model_info, open_quietly
    from moectl.shared.terminal.progress import progress_bar
    from profilers.quantise.estimate import expert_s
    from profilers.quantise.method import TRELLIS, check_method, projections, smaller
    from profilers.quantise.replicas import build_replicas
    from profilers.workers.choose import LOCAL, check_device, executing

    phases.begin("opening the model")
    opened = open_quietly(name, device=options.device)
    if options.executor != LOCAL:
        check_device(opened)
    check_method(method, projections(opened.layers[0]))
    # refused before text is read where no width would save anything
    fewer = smaller(method, opened)
    data = calibration_data(opened, options, seed=seed)
    model = model_info(name, opened)
    phases.begin("measuring one expert")
    seconds = expert_s(opened, fewer, sum(map(len, data.sequences))) * opened.shape.num_keys
    with (
        executing(options.executor, options.jobs) as executor,
        progress_bar("quantising", unit="experts") as advance,
    ):
        whole = spoken(seconds / min(executor.count, opened.shape.num_experts))
        quicker = ", --recipe refined takes less" * (fewer.recipe == TRELLIS and seconds > _LONG_S)
        phases.begin(
            f"quantising {opened.shape.num_keys:,} experts, about {whole} from the first{quicker}"
        )
        return build_replicas(
            opened,
            data,
            method,
            model=model,
            store_path=store,
            read={"samples": options.samples, "length": options.length},
            executor=executor,
            progress=advance,
        )


def spoken(seconds: float) -> str:
    """A time to wait for in words, to about two digits."""
    for unit, name in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
    return "a second"


def calibration_data(opened: "MoeModel", options: QuantizeOptions, *, seed: int = 0) -> "TextData":
    """Read the first sequences of the text."""
    from moectl.shared.text import read_data

    if options.samples < 1:
        raise BadUsage(f"calibration needs at least one sequence, not {options.samples}")
    return read_data(
        opened,
        options.data,
        length=options.length,
        num_tokens=options.samples * options.length,
        seed=seed,
        at_most=options.samples,
    )


def _layer_sheet(built: "BuiltReplicas") -> "Sheet":
    """Return the mean relative error of the experts' outputs, by layer and width."""
    import numpy as np

    from moectl.show.render import Sheet, fewer, human_bytes

    widths = sorted(built.records[0].nbytes)
    layers = defaultdict(list)
    for record in built.records:
        errors = [float(record.metadata[f"{bits}.relative"]) for bits in widths]
        layers[int(record.metadata["layer"])].append(errors)
    rows = [
        (layer, *map(float, np.mean(values, axis=0))) for layer, values in sorted(layers.items())
    ]
    total = _nbytes(built)
    sizes = ", ".join(f"{bits} bits {human_bytes(size)}" for bits, size in total.items())
    note = (
        f"run {built.run_id}: {len(built.records):,} experts on {built.num_tokens:,} tokens in "
        f"{built.seconds:.1f} s ({built.resumed:,} done before{_remade(built)}), "
        f"{_num_borrowed(built):,} judged on their layer's tokens; bytes: "
        f"{sizes}{_skipped(built)}{COSTS[built.recipe]}{fewer(built.shortfall)}"
    )
    return Sheet(
        "Relative error of experts' outputs",
        ("layer", *(f"{bits} bits" for bits in widths)),
        rows,
        note,
    )


def _skipped(built: "BuiltReplicas") -> str:
    bits = ", ".join(map(str, built.skipped))
    return (
        f"; left out: {bits} bits, which are no smaller than the experts of the checkpoint"
        if bits
        else ""
    )


def _remade(built: "BuiltReplicas") -> str:
    return f", {built.remade:,} of other weights made again" if built.remade else ""


def _nbytes(built: "BuiltReplicas") -> dict["Width", int]:
    """Return the bytes of all replicas, by width."""
    return {
        bits: sum(record.nbytes[bits] for record in built.records)
        for bits in sorted(built.records[0].nbytes)
    }


def _num_borrowed(built: "BuiltReplicas") -> int:
    """Return how many experts had too few tokens of their own."""
    return sum(record.metadata["basis"] == "layer" for record in built.records)
