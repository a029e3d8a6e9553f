"""`moectl report`: what a store knows of a model, as one self-contained page."""

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
    """The page that was written."""

    path: Path
    nbytes: int


def check_report(path: Path) -> None:
    """Raise BadUsage or BadInput now for a page that could not be written later."""
    if path.suffix not in _SUFFIXES:
        raise BadUsage(f"a report is an HTML page: name it {path.stem or 'report'}.html, not {path.name!r}")
    check_writable(path)


def report(path: Path, *, store: Path, job: str | None = None, run: int | None = None) -> Reported:
    """Write the page of a model: that of the run, else that of the newest bench in the store.

    `job` names the bench that comes first; a run of a bench names its own, otherwise it is the newest live one.
    """
    check_report(path)
    _bring_up_to_date(store)
    with Store.open(store, read_only=True) as opened:
        asked = opened.run(run).info if run is not None else None
        job = job or (asked and asked.parameters.get("job"))
        page = render(opened, job=job, model_id=asked and asked.model_id)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return Reported(path, path.stat().st_size)


def _bring_up_to_date(path: Path) -> None:
    """Migrate an older store, whose missing tables the queries name. Opening it for writing copies it first."""
    with Store.open(path, read_only=True) as opened:
        tables = opened.query("SELECT table_name FROM duckdb_tables()")["table_name"].to_pylist()
    if not ARTEFACT_TABLES.keys() <= set(tables):
        Store.open(path).close()


def show(reported: Reported, *, as_json: bool) -> None:
    """Print the path of the page, or one JSON object."""
    if as_json:
        show_json({"path": str(reported.path), "nbytes": reported.nbytes})
    else:
        line = f"{reported.path}: {human_bytes(reported.nbytes)}, one page that needs nothing else"
        console().print(line, markup=False)
