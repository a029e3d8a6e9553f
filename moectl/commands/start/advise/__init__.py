"""`moectl advise`: the settings of the engine that a user has, and what they would give, from a
config or a header alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moectl.bundled import as_named, demo_model
from moectl.cli import completion
from moectl.cli.options import StorePath
from moectl.commands.start.plan import PlaceOptions
from moectl.shared.defaults import DEFAULT_STORE


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The run that the advice is compared with."""

    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run llama.cpp or moectl on this machine's CPU and compare, kept in the store.",
        ),
    ] = False
    engine_log: Annotated[
        Path | None,
        typer.Option(help="Compare with this instead: `llama-bench -o json`, or a server's log."),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads of the run to verify.", show_default="all cores"),
    ] = None


def advise(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, a folder or config.json, a name, or owner/name:Q4_K_M; no weights "
            "are read.",
            autocompletion=completion.models,
        ),
    ],
    place: PlaceOptions,
    engine: Annotated[
        str,
        typer.Option(
            "--for", help="llama.cpp, strata, freetoken, ktransformers or moectl.", metavar="ENGINE"
        ),
    ] = "llama.cpp",
    trace: Annotated[
        str | None,
        typer.Option(
            help="A Parquet trace of your text, or the name of a bundled one.",
            show_default="the bundled one of the nearest model",
        ),
    ] = None,
    context: Annotated[
        int, typer.Option("-c", "--context", help="Tokens that the attention cache holds.")
    ] = 4096,
    what_if: Annotated[
        str | None,
        typer.Option(
            help='What each would give alone: "+8GiB vram, ddr5-6000, pcie5, quant Q3_K_M, mtp".'
        ),
    ] = None,
    verifying: VerifyOptions,
    store: StorePath = DEFAULT_STORE,
) -> None:
    """Say which flags of your engine to set, and how fast."""
    from moectl.commands.start.advise.answer import lines
    from moectl.commands.start.advise.choosing import advise_on
    from moectl.commands.start.advise.engines import engine_of
    from moectl.commands.start.advise.what_if import changes_of, told
    from moectl.commands.start.plan.fitting import PlanRequest

    asked = engine_of(engine)
    named = as_named(model) or str(demo_model())
    request = PlanRequest(named, place.find(), context)
    if verifying.verify or verifying.engine_log:
        from moectl.commands.start.advise.verifying import verified

        run = {"threads": verifying.threads, "log": verifying.engine_log}
        print(verified(request, asked, trace=trace, store=store, **run))
        return
    if what_if is not None:
        shown = told(changes_of(what_if), request, asked, trace)
    else:
        advice = advise_on(request, asked, trace)
        if store.exists():
            from moectl.commands.start.advise.verifying import as_verified

            advice = as_verified(advice, store)
        shown = lines(advice)
    for line in shown:
        print(line)
