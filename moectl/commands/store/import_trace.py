"""`moectl import-trace`: another program's routing log becomes a trace that `moectl simulate`
reads."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from artifacts.common.files import check_writable
from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput, BadUsage
from artifacts.importers import KINDS
from moectl.cli import completion
from moectl.cli.options import Json


def import_trace(
    *,
    file: Annotated[Path, typer.Argument(help="The log: a file, or a folder of one file a layer.")],
    kind: Annotated[
        str,
        typer.Option(
            "--as", help=f"What it is: {', '.join(KINDS)}.", autocompletion=completion.kinds_of_logs
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The trace to write. [default: NAME-trace.parquet]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Take only the first so many tokens.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="moe-jsonl, csv, llama.cpp, ds4: take calls that decode so many requests."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="router-logits, llama.cpp: experts that a token selects."),
    ] = None,
    json: Json = False,
) -> None:
    """Read another program's log of its routers.

    It becomes a trace for `moectl simulate`.
    """
    import numpy as np

    from artifacts.importers.routing_log import LogOptions, trace_of
    from artifacts.traces.parquet import write_parquet
    from artifacts.traces.trace import DECODE
    from moectl.show.render import Sheet, show_json, show_sheet

    if kind not in KINDS:
        raise BadUsage(unknown("kind of log", kind, KINDS))
    path = out or Path(f"{file.stem}-trace.parquet")
    check_writable(path)
    if path.exists() and file.exists() and path.samefile(file):
        raise BadInput(f"{path} is the log itself: give another file as --out")
    try:
        log = import_module(f"artifacts.importers.{KINDS[kind][0]}").read(
            file, LogOptions(tokens=tokens, batch=batch, top_k=top_k)
        )
        trace = trace_of(log, tokens=tokens)
    except BadInput as error:
        raise BadInput(
            f"{file} makes no trace: {error}" if str(file) not in str(error) else str(error)
        ) from error
    write_parquet(trace, path, without=() if log.weights is not None else ("weights",))
    first = trace.layer == 0
    held = {
        "requests": len(np.unique(trace.request)),
        "passes": len(np.unique(trace.pass_)),
        "tokens prefilled": int((first & (trace.phase != DECODE)).sum()),
        "tokens decoded": int((first & (trace.phase == DECODE)).sum()),
        "layers": trace.num_layers,
        "experts a token": trace.top_k,
        "highest expert": int(trace.experts.max()),
    }
    if json:
        named = {name.replace(" ", "_"): number for name, number in held.items()}
        show_json({"trace": str(path), "rows": len(trace), **named, "assumed": list(trace.assumed)})
        return
    show_sheet(Sheet(str(path), tuple(held), [tuple(held.values())]))
    for line in trace.assumed:
        print(f"assumed: {line}")
