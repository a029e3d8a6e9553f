"""The command line of `moectl plan`."""

from typing import Annotated

import typer

from moectl.cli import completion
from moectl.cli.options import Clients, Dense, Json


def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="A name as qwen3-30b-a3b, a config.json's folder, a GGUF file, or bundled.",
            autocompletion=completion.models,
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            help="Whose memory and bandwidths, as rtx4090 or m4-max; `moectl inspect machines` "
            "lists them; NAME:load=14ms,layer=1ms,head=1ms: by times.",
            show_default="this machine's GPU",
            autocompletion=completion.machines,
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(help="Memory of the GPU, as 24GB.", show_default="all that the machine has"),
    ] = None,
    dense: Dense = None,
    context: Annotated[
        int, typer.Option(help="Tokens of a request that the attention cache holds.")
    ] = 4096,
    clients: Clients = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Replay every preset too, in half a minute.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what fits into a GPU, from a model's config alone."""
    from moectl.commands.start import plan as command

    deployment = command.plan(
        model, vram=vram, machine=machine, context=context, dense=dense, clients=clients
    )
    if json:
        command.show_record(command.simulate(deployment) if simulate else deployment)
        return
    command.show(deployment)
    deployment = command.simulate(deployment) if simulate else deployment
    command.show_simulated(deployment)
    command.show_advice(deployment)
