"""`moectl report`: what a store knows of a model, as one page that needs nothing else."""

from dataclasses import dataclass
from pathlib import Path

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadUsage
from artifacts.store.schema import ARTEFACT_TABLES
from artifacts.store.store import Store
from moectl.report.page import render
from moectl.show.render import console, human_bytes, show_json

_SUFFIXES = (".html", ".htm")


@dataclass(frozen=True, slots=True)
class Reported:
    """Where the page lies."""

    path: Path
    nbytes: int


def check_report(path: Path) -> None:
    """Raise BadUsage or BadInput, before the work, when a page could not be written after it."""
    if path.suffix not in _SUFFIXES:
        raise BadUsage(f"a report is an HTML page: name it {path.stem or 'report'}.html, not {path.name!r}")
    check_writable(path)


def report(path: Path, *, store: Path, job: str | None = None, run: int | None = None) -> Reported:
    """Write the page of the model of the newest bench in a store, or of that of a run.

    `job` names the bench that leads it; a run of a bench names its own. Else the newest live one leads.
    """
    check_report(path)
    _bring_up_to_date(store)
    with Store.open(store, read_only=True) as held:
        asked = held.run(run).info if run is not None else None
        job = job or (asked and asked.parameters.get("job"))
        page = render(held, job=job, model_id=asked and asked.model_id)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return Reported(path, path.stat().st_size)


def _bring_up_to_date(path: Path) -> None:
    """Queries name tables that an older store lacks. Whoever opens it to write adds them, after a copy."""
    with Store.open(path, read_only=True) as held:
        found = held.query("SELECT table_name FROM duckdb_tables()")["table_name"].to_pylist()
    if not ARTEFACT_TABLES.keys() <= set(found):
        Store.open(path).close()


def show(reported: Reported, *, as_json: bool) -> None:
    """Say where it lies."""
    if as_json:
        show_json({"path": str(reported.path), "nbytes": reported.nbytes})
    else:
        told = f"{reported.path}: {human_bytes(reported.nbytes)}, one page that needs nothing else"
        console().print(told, markup=False)
