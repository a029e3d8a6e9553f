"""Options that several commands share, so that they look and mean the same everywhere."""

import os
from pathlib import Path
from typing import Annotated

import typer

from artifacts.errors import BadUsage
from moectl import bundled
from moectl.cli import completion


def _or_bundled(context: typer.Context, name: str | None) -> str | None:
    """None for the bundled model, and a word where the store (which is read first) suggests that another was meant."""
    if name is None and not context.resilient_parsing and (told := bundled.also_held(context.params["store"])):
        typer.echo(f"moectl: {told}: name it after `{context.info_name}` to mean it", err=True)
    return bundled.as_named(name)


StorePath = Annotated[
    Path, typer.Option("--store", envvar="MOECTL_STORE", is_eager=True, help="The store: one DuckDB file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
RunId = Annotated[int | None, typer.Option("--run", min=1, help="A run of the store; the newest that fits by default.")]

Model = Annotated[
    str | None,
    typer.Argument(callback=_or_bundled, help="A checkpoint: a local folder or a hub id; else the bundled one."),
]
AnyModel = Annotated[str | None, typer.Argument(help="A checkpoint: a local folder or a hub id; else whichever fits.")]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        help="The fast tier: 25%, 96x (experts) or 2GiB, over all layers.",
        autocompletion=completion.words(completion.BUDGETS),
    ),
]
Link = Annotated[
    str,
    typer.Option(
        "--link",
        help="disk, direct (no page cache), cuda, or a rate as 5GB/s+10us.",
        autocompletion=completion.words(completion.LINKS),
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="auto, cpu or cuda.", autocompletion=completion.words(completion.DEVICES))
]
Devices = Annotated[
    int,
    typer.Option(
        "--devices", min=1, help="Spread experts over so many GPUs; where there are fewer, over parts of one device."
    ),
]
# Threads that wait for each other spin: without a core for the link they take tens of times longer.
DEFAULT_THREADS = max(1, (os.cpu_count() or 2) - 1)
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=1,
        show_default="all cores but one",
        help="CPU threads that compute; leave one core to the link.",
    ),
]
Experts = Annotated[
    str,
    typer.Option(
        help="exact, the model's own bits, or fused: compiled, the same within rounding.",
        autocompletion=completion.words(("exact", "fused")),
    ),
]
Base = Annotated[
    int, typer.Option("--base", help="Bits of all experts: 16, as the checkpoint has them, or 4, 3, 2: as quantised.")
]
AvgBits = Annotated[
    float | None,
    typer.Option(help="Of experts that are not hot, 1 to 4 or 16: --residency hot:avg_bits=N."),
]
Executor = Annotated[
    str, typer.Option("--executor", help="Where jobs run: local, ray (a cluster begun here), ray:auto, ray:HOST:PORT.")
]
Data = Annotated[
    str, typer.Option(help="Text: a file or folder, hf:name[:config[:split]], builtin or builtin:held-out.")
]
Preset = Annotated[
    str,
    typer.Option(
        help="A named set of policies; `moectl inspect presets` lists them.", autocompletion=completion.presets
    ),
]
Scope = Annotated[
    str | None,
    typer.Option(
        help="layer or global: where an expert may take its slot.",
        autocompletion=completion.words(("layer", "global")),
    ),
]
ScaledTo = Annotated[
    str | None,
    typer.Option(
        help="Emulate link and near tier in the proportions of a named machine.", autocompletion=completion.machines
    ),
]
Window = Annotated[str | None, typer.Option(help="Bytes that may be prefetched per layer, as 64MiB.")]
ReconfigureEvery = Annotated[
    int | None,
    typer.Option(
        help="Tokens after which a solved split is solved anew, between requests; 0: never. [default: 5000]",
        show_default=False,
    ),
]
_OVERRIDE = "Override the preset on this axis: name or name:field=value,..."
Routing = Annotated[str | None, typer.Option(help=_OVERRIDE, autocompletion=completion.policies("routing"))]
Prefetch = Annotated[str | None, typer.Option(help=_OVERRIDE, autocompletion=completion.policies("prefetch"))]
Eviction = Annotated[str | None, typer.Option(help=_OVERRIDE, autocompletion=completion.policies("eviction"))]
Miss = Annotated[str | None, typer.Option(help=_OVERRIDE, autocompletion=completion.policies("miss"))]
Residency = Annotated[str | None, typer.Option(help=_OVERRIDE, autocompletion=completion.policies("residency"))]


def hot_residency(residency: str | None, avg_bits: float | None) -> str | None:
    """What `--residency` and `--avg-bits` say together. Raises BadUsage when both are given."""
    if avg_bits is None:
        return residency
    if residency is not None:
        raise BadUsage("--avg-bits is short for --residency hot:avg_bits=N: give one of them")
    return f"hot:avg_bits={avg_bits:g}"
