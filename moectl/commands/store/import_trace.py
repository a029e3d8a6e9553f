"""`moectl import-trace`: another program's routing log becomes a trace that `moectl simulate`
reads."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from artifacts.common.files import check_writable
from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput, BadUsage
from artifacts.importers import KINDS
from artifacts.importers.routing_log import LogOptions, trace_of
from artifacts.traces.parquet import write_parquet
from artifacts.traces.trace import DECODE, Trace
from moectl.show.render import Sheet, show_json, show_sheet


@dataclass(frozen=True, slots=True)
class TraceImport:
    """The trace that was written to `path`."""

    path: Path
    trace: Trace


def import_trace(source: Path, kind: str, out: Path | None, options: LogOptions) -> TraceImport:
    """Read a log of this kind and write its trace, by default beside nothing else:
    `NAME-trace.parquet` in the working folder. Raises BadUsage for an unknown kind, BadInput for a
    log that cannot be read, and writes nothing then."""
    if kind not in KINDS:
        raise BadUsage(unknown("kind of log", kind, KINDS))
    path = out or Path(f"{source.stem}-trace.parquet")
    check_writable(path)
    if path.exists() and source.exists() and path.samefile(source):
        raise BadInput(f"{path} is the log itself: give another file as --out")
    try:
        log = import_module(f"artifacts.importers.{KINDS[kind][0]}").read(source, options)
        trace = trace_of(log, tokens=options.tokens)
    except BadInput as error:
        raise BadInput(
            f"{source} makes no trace: {error}" if str(source) not in str(error) else str(error)
        ) from error
    write_parquet(trace, path, without=() if log.weights is not None else ("weights",))
    return TraceImport(path, trace)


def show(imported: TraceImport, *, as_json: bool) -> None:
    """Print what the trace holds and what was assumed, or one JSON object."""
    trace = imported.trace
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
    if as_json:
        named = {name.replace(" ", "_"): number for name, number in held.items()}
        show_json(
            {
                "trace": str(imported.path),
                "rows": len(trace),
                **named,
                "assumed": list(trace.assumed),
            }
        )
        return
    show_sheet(Sheet(str(imported.path), tuple(held), [tuple(held.values())]))
    for line in trace.assumed:
        print(f"assumed: {line}")
