"""`moectl report`: what a store knows of a model, as one self-contained page or as a folder of
pictures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadUsage, Incompatible
from moectl.cli.options import Json, StorePath
from moectl.shared.defaults import DEFAULT_STORE

if TYPE_CHECKING:
    from artifacts.store.store import Store

_SUFFIXES = (".html", ".htm")


def report(
    *,
    out: Annotated[
        Path,
        typer.Argument(help="The page to write, as report.html; or a folder, for SVG pictures."),
    ],
    store: StorePath = DEFAULT_STORE,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="A run: of its model, led by its bench.")
    ] = None,
    json: Json = False,
) -> None:
    """Write what a store knows as one HTML page, or as pictures.

    The page has words, charts, tables, and the query of each. A folder for OUT gets the pictures
    alone.
    """
    from moectl.show.render import console, human_bytes, show_json

    if not out.suffix or out.is_dir():
        told = _draw(out, store=store, run=run)
        lines = _lines(**told)
    else:
        nbytes = write_page(out, store=store, run=run)
        told = {"path": str(out), "nbytes": nbytes}
        lines = [f"{out}: {human_bytes(nbytes)}, one page that needs nothing else"]
    if json:
        show_json(told)
        return
    for line in lines:
        console().print(line, markup=False)


def check_report(path: Path) -> None:
    """Raise BadUsage or BadInput now for a page that could not be written later."""
    if path.suffix not in _SUFFIXES:
        raise BadUsage(
            f"a report is an HTML page: name it {path.stem or 'report'}.html, not {path.name!r}"
        )
    check_writable(path)


def write_page(path: Path, *, store: Path, job: str | None = None, run: int | None = None) -> int:
    """Write the page of a model: the model of the run, else the model of the newest bench in the
    store. Return its bytes.

    `job` names the bench that comes first. A run of a bench names its own; otherwise it is the
    newest live one.
    """
    from moectl.report.page import render

    check_report(path)
    with _asked(store, run) as (opened, own_job, model_id):
        page = render(opened, job=job or own_job, model_id=model_id)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path.stat().st_size


def _lines(pictures: dict[str, str], missing: dict[str, str]) -> list[str]:
    written = [f"{path}: {title}" for path, title in pictures.items()]
    return written + [f"no {name}.svg: it needs {why}" for name, why in missing.items()]


def _draw(folder: Path, *, store: Path, run: int | None) -> dict[str, dict[str, str]]:
    """Write the store's knowledge of a model, of the run or of the newest bench, as SVG files into
    a folder. Return the titles of these pictures by path, and what missing ones need, by name."""
    from moectl.charts.pictures import write_picture
    from moectl.report.gallery import gallery

    pictures = {}
    missing = {}
    with _asked(store, run) as (opened, job, model_id):
        for picture in gallery(opened, job=job, model_id=model_id):
            if picture.drawing is None:
                missing[picture.name] = picture.why
                continue
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{picture.name}.svg"
            write_picture(picture.drawing, path)
            pictures[str(path)] = picture.drawing.title
    if not pictures:
        raise Incompatible(
            f"{store} holds nothing to draw: `moectl bench` and `moectl profile --trace` make some"
        )
    return {"pictures": pictures, "missing": missing}


@contextmanager
def _asked(path: Path, run: int | None) -> Iterator[tuple["Store", str | None, str | None]]:
    """Open a store for reading; lend it with the job and the model of a run, if one is named.

    An older store, whose missing tables the queries name, is migrated: opening it for writing
    copies it first.
    """
    from artifacts.store.schema import ARTEFACT_TABLES
    from artifacts.store.store import Store

    with Store.open(path, read_only=True) as opened:
        tables = opened.columns().keys()
    if not ARTEFACT_TABLES.keys() <= tables:
        Store.open(path).close()
    with Store.open(path, read_only=True) as opened:
        asked = opened.run(run).info if run is not None else None
        yield opened, asked and asked.parameters.get("job"), asked and asked.model_id
