"""The command line of `moectl generate`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.groups import fill
from moectl.cli.options import (
    AvgBits,
    Executor,
    Json,
    Model,
    PolicyOptions,
    PresetOptions,
    RunOptions,
    SamplingOptions,
    StorePath,
)
from moectl.shared.defaults import DEFAULT_STORE, FAST
from moectl.shared.importing import importing


def generate(
    *,
    model: Model = None,
    data: Annotated[
        str, typer.Option(metavar="FILE", help="Prompts: a text, jsonl or parquet file.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Answers, a JSON line each; begun ones go on.")
    ],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Prompts at a time; else what memory allows.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Processes that answer, each on one thread and with the budget; else this one "
                "alone."
            ),
        ),
    ] = None,
    executor: Executor = "local",
    kv: Annotated[
        str,
        typer.Option(help="Where keys and values lie: fast, beside the model, or slow, in RAM."),
    ] = FAST,
    chosen: PresetOptions,
    policies: PolicyOptions,
    avg_bits: AvgBits = None,
    options: RunOptions,
    drawn: SamplingOptions,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check replica files by their hashes first.")
    ] = False,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Answer the prompts of a file, many at a time.

    An expert that is loaded serves every prompt that wants it. The same command goes on where it
    was stopped.
    """
    from moectl.show.waiting import loading

    settings = chosen.settings(
        store,
        options,
        model=model,
        base=options.base,
        policies=policies.given(avg_bits),
        verify=verify,
    )
    with loading(model, preset=chosen.preset, budget=chosen.budget, is_quiet=json) as waiting:
        with importing(says=""):
            from moectl.commands.start import generate as command

        sampling = fill(
            command.Sampling, drawn, temperature=0.0 if drawn.greedy else drawn.temperature
        )
        request = command.GenerateRequest(
            data, out, settings, sampling, options.base, batch, executor, jobs, kv, json
        )
        command.generate_command(model, request, waiting, store=store)
