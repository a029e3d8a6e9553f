"""The command line of `moectl quantize`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import Data, Device, Executor, Json, Model, Seed, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


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
        from moectl.commands.build import quantize as command
        from profilers.quantise.method import Method

    bits, recipe = command.parse_bits(options.bits, options.recipe, group_size=options.group_size)
    group_size = options.group_size or Method().group_size
    method = fill(Method, options, bits=bits, recipe=recipe, group_size=group_size)
    request = fill(command.QuantizeRequest, options, method=method, seed=seed)
    command.show(command.quantize(model, request, store=store), as_json=json)
