"""`moectl quantize`: make replicas of every expert at a few bits and measure their loss, into files
and the store."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from artifacts.errors import BadUsage
from artifacts.quantisation import gptq
from artifacts.quantisation.widths import (
    SCALAR_WIDTHS,
    TRELLIS_WIDTHS,
    USUAL_WIDTHS,
    Width,
    as_width,
)
from artifacts.store.runs import ModelInfo
from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.progress import Phases, progress_bar
from moectl.shared.resuming import resumable
from moectl.shared.stores import check_store
from moectl.shared.text import read_data
from moectl.show.render import Sheet, fewer, human_bytes, show_json, show_sheet
from profilers.quantise.estimate import expert_s
from profilers.quantise.method import (
    PLAIN,
    REFINED,
    TRELLIS,
    Method,
    check_method,
    projections,
    smaller,
)
from profilers.quantise.replicas import BuiltReplicas, build_replicas
from profilers.text.batches import Data
from profilers.text.corpus import documents
from profilers.workers.choose import LOCAL, check_device, check_executor, executing
from runtime.model.open import MoeModel

_LONG_S = 1800.0  # of all experts on one core, above which the quick recipe is named
COSTS = {
    TRELLIS: "",
    REFINED: (
        "; recipe refined: a quarter to a seventh of trellis' time, and more loss at up to 3 bits"
    ),
    PLAIN: "; recipe plain: GPTQ as published, for comparison; trellis and refined lose less",
}


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """Request for replicas: the method, by default the one with the least loss, and the text `data`
    to calibrate on, `samples` sequences of at most `length` tokens."""

    method: Method = field(default_factory=lambda: Method(TRELLIS_WIDTHS, recipe=TRELLIS))
    data: str = "builtin"
    samples: int = 128
    length: int = 512
    seed: int = 0
    jobs: int | None = None
    executor: str = LOCAL
    device: str = "auto"

    def __post_init__(self) -> None:
        check_executor(self.executor)


def parse_bits(
    text: str | None, recipe: str | None, *, group_size: int | None = None
) -> tuple[tuple[Width, ...], str]:
    """Return the widths of a text such as `1,1.5,2`, rising, and the recipe.

    `text` None stands for the usual widths of the recipe. Without a named recipe it is trellis
    codes, which lose least, unless a group size or some of the widths are GPTQ's alone. Raises
    BadUsage for anything but numbers, and for trellis codes with a group size.
    """
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
def quantize(name: str | None, request: QuantizeRequest, *, store: Path) -> BuiltReplicas:
    """Quantise the model `name`, a folder or hub id (None: the bundled one)."""
    name = name or str(demo_model())
    check_store(store)
    documents(request.data)  # a wrong path is reported before a model is opened
    with Phases(1, 1, 38) as phases:
        return _quantize(name, request, phases, store=store)


def _quantize(name: str, request: QuantizeRequest, phases: Phases, *, store: Path) -> BuiltReplicas:
    phases.begin("opening the model")
    opened = open_quietly(name, device=request.device)
    if request.executor != LOCAL:
        check_device(opened)
    check_method(request.method, projections(opened.layers[0]))
    # refused before text is read where no width would save anything
    method = smaller(request.method, opened)
    data = calibration_data(opened, request)
    model = ModelInfo(name, opened.fingerprint, opened.family, opened.shape)
    phases.begin("measuring one expert")
    seconds = expert_s(opened, method, sum(map(len, data.sequences))) * opened.shape.num_keys
    with (
        executing(request.executor, request.jobs) as executor,
        progress_bar("quantising", unit="experts") as advance,
    ):
        whole = spoken(seconds / min(executor.count, opened.shape.num_experts))
        quicker = ", --recipe refined takes less" * (method.recipe == TRELLIS and seconds > _LONG_S)
        phases.begin(
            f"quantising {opened.shape.num_keys:,} experts, about {whole} from the first{quicker}"
        )
        return build_replicas(
            opened,
            data,
            request.method,
            model=model,
            store_path=store,
            read={"samples": request.samples, "length": request.length},
            executor=executor,
            progress=advance,
        )


def spoken(seconds: float) -> str:
    """A time to wait for in words, to about two digits."""
    for unit, name in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 1.5 * unit:
            return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
    return "a second"


def calibration_data(opened: MoeModel, request: QuantizeRequest) -> Data:
    """Read the first sequences of the text."""
    if request.samples < 1:
        raise BadUsage(f"calibration needs at least one sequence, not {request.samples}")
    return read_data(
        opened,
        request.data,
        length=request.length,
        num_tokens=request.samples * request.length,
        seed=request.seed,
        at_most=request.samples,
    )


def show(built: BuiltReplicas, *, as_json: bool) -> None:
    """Print the loss of each width, layer by layer, or one JSON object."""
    sheet = layer_sheet(built)
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
            "borrowing": num_borrowed(built),
            "skipped": built.skipped,
        }
        summary |= {"shortfall": built.shortfall}
        show_json(
            summary
            | {"folder": str(built.folder), "bytes": nbytes(built), "layers": sheet.records()}
        )
    else:
        show_sheet(sheet)


def layer_sheet(built: BuiltReplicas) -> Sheet:
    """Return the mean relative error of the experts' outputs, by layer and width."""
    widths = sorted(built.records[0].nbytes)
    layers = defaultdict(list)
    for record in built.records:
        errors = [float(record.metadata[f"{bits}.relative"]) for bits in widths]
        layers[int(record.metadata["layer"])].append(errors)
    rows = [
        (layer, *map(float, np.mean(values, axis=0))) for layer, values in sorted(layers.items())
    ]
    total = nbytes(built)
    sizes = ", ".join(f"{bits} bits {human_bytes(size)}" for bits, size in total.items())
    note = (
        f"run {built.run_id}: {len(built.records):,} experts on {built.num_tokens:,} tokens in "
        f"{built.seconds:.1f} s ({built.resumed:,} done before{_remade(built)}), "
        f"{num_borrowed(built):,} judged on their layer's tokens; bytes: "
        f"{sizes}{_skipped(built)}{COSTS[built.recipe]}{fewer(built.shortfall)}"
    )
    return Sheet(
        "Relative error of experts' outputs",
        ("layer", *(f"{bits} bits" for bits in widths)),
        rows,
        note,
    )


def _skipped(built: BuiltReplicas) -> str:
    bits = ", ".join(map(str, built.skipped))
    return (
        f"; left out: {bits} bits, which are no smaller than the experts of the checkpoint"
        if bits
        else ""
    )


def _remade(built: BuiltReplicas) -> str:
    return f", {built.remade:,} of other weights made again" if built.remade else ""


def nbytes(built: BuiltReplicas) -> dict[Width, int]:
    """Return the bytes of all replicas, by width."""
    return {
        bits: sum(record.nbytes[bits] for record in built.records)
        for bits in sorted(built.records[0].nbytes)
    }


def num_borrowed(built: BuiltReplicas) -> int:
    """Return how many experts had too few tokens of their own."""
    return sum(record.metadata["basis"] == "layer" for record in built.records)
