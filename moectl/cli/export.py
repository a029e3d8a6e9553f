"""The command line of `moectl export`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.options import AnyModel, Budget, Json, RunId, StorePath
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


def export(
    *,
    model: AnyModel = None,
    what: Annotated[
        str,
        typer.Option(
            help="gptq (a checkpoint: experts from their replicas, the rest as it is), gguf (the "
            "model as one file for llama.cpp), buddies, splits, placement or profile (JSON), "
            "routing (CSV), override-tensor (an option of llama.cpp)."
        ),
    ] = "gptq",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write, else stdout; of gptq a new folder, of gguf a new file."
        ),
    ] = None,
    bits: Annotated[int, typer.Option(help="Of gptq: 2, 3, 4 or 8.")] = 4,
    type: Annotated[
        str, typer.Option(help="Of gguf: f32, f16, bf16, q8_0, q4_0 or mxfp4.")
    ] = "bf16",
    budget: Budget = "25%",
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    json: Json = False,
) -> None:
    """Write a store, or the model, for other programs."""
    with importing():
        from moectl.commands.store import export as command
        from moectl.commands.store.export import gguf as export_gguf

    if what == export_gguf.GGUF:
        export_gguf.show(export_gguf.export(model, out, type), as_json=json)
        return
    if what != command.GPTQ:
        text = command.export_text(model, what, out, budget=budget, store=store, run=run)
        command.show_text(text, as_json=json)
        return
    command.show(command.export(model, out, bits=bits, store=store, run=run), as_json=json)
