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
            help="Widths of the replicas, of 1, 2, 3, 4 and 8 (else 1,2,3,4); of trellis 0.6 to 4 (else all of them).",
            show_default=False,
        ),
    ] = None
    group_size: Annotated[
        int, typer.Option(min=1, help="Inputs that share a scale; 128, 64 and 32 give way where they do not divide.")
    ] = 128
    samples: Annotated[int, typer.Option(min=1, help="Sequences of text to calibrate on.")] = 128
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence, at most.")] = 512
    recipe: Annotated[
        str,
        typer.Option(
            help="refined (GPTQ with smaller errors), plain (GPTQ as published), or trellis: smallest errors, longest."
        ),
    ] = "refined"
    damp: Annotated[float, typer.Option(help="Added to the Hessian's diagonal, as a share of its mean.")] = 0.01
    min_samples: Annotated[
        int, typer.Option(min=0, help="Experts with fewer tokens of their own are judged on their layer's.")
    ] = 64
    data: Data = "builtin"
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Experts at a time, each in a process of one thread; else one a core."),
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
        from moectl.commands import quantize as command
        from profilers.quantise.method import Method

    method = fill(Method, options, bits=command.parse_bits(options.bits, options.recipe))
    request = fill(command.QuantizeRequest, options, method=method, seed=seed)
    command.show(command.quantize(model, request, store=store), as_json=json)
