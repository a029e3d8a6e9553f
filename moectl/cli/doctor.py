"""The command line of `moectl doctor`."""

from typing import Annotated

import typer

from moectl.cli.options import EngineOptions, Json, Model, StorePath
from moectl.shared.defaults import DEFAULT_STORE


def doctor(
    *,
    model: Model = None,
    engine: EngineOptions,
    store: StorePath = DEFAULT_STORE,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure too, a quarter of a minute or more, and check a prediction."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Say what this machine can run, and what is in the way.

    --measure says what it takes, too.
    """
    from moectl.shared import installed

    installed.check()  # before the command imports packages that may be missing
    from moectl.commands.start import doctor as command

    diagnosis = command.doctor(
        model,
        budget=engine.budget,
        link=engine.link,
        device=engine.device,
        threads=engine.threads,
        store=store,
        measure=measure,
        is_quiet=json,
    )
    command.show(diagnosis, as_json=json)
