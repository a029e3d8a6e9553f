"""`moectl report`: what a store knows of a model, as one self-contained page or as a folder of
pictures."""

from pathlib import Path
from typing import Annotated

import typer

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadUsage, Incompatible
from moectl.cli.options import Json, StorePath
from moectl.shared.defaults import DEFAULT_STORE

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

    if out.suffix and not out.is_dir():
        write_page(out, store=store, run=run)
        nbytes = out.stat().st_size
        if json:
            show_json({"path": str(out), "nbytes": nbytes})
        else:
            line = f"{out}: {human_bytes(nbytes)}, one page that needs nothing else"
            console().print(line, markup=False)
        return
    pictures, missing = _draw(out, store=store, run=run)
    if json:
        show_json({"pictures": pictures, "missing": missing})
        return
    lines = [f"{path}: {title}" for path, title in pictures.items()]
    lines += [f"no {name}.svg: it needs {why}" for name, why in missing.items()]
    for line in lines:
        console().print(line, markup=False)


def check_report(path: Path) -> None:
    """Raise BadUsage or BadInput now for a page that could not be written later."""
    if path.suffix not in _SUFFIXES:
        raise BadUsage(
            f"a report is an HTML page: name it {path.stem or 'report'}.html, not {path.name!r}"
        )
    check_writable(path)


def write_page(path: Path, *, store: Path, job: str | None = None, run: int | None = None) -> None:
    """Write the page of a model: the model of the run, else the model of the newest bench in the
    store.

    `job` names the bench that comes first. A run of a bench names its own; otherwise it is the
    newest live one.
    """
    from artifacts.store.store import Store
    from moectl.report.page import render

    check_report(path)
    _bring_up_to_date(store)
    with Store.open(store, read_only=True) as opened:
        asked = opened.run(run).info if run is not None else None
        job = job or (asked and asked.parameters.get("job"))
        page = render(opened, job=job, model_id=asked and asked.model_id)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _draw(folder: Path, *, store: Path, run: int | None) -> tuple[dict[str, str], dict[str, str]]:
    """Write the store's knowledge of a model, of the run or of the newest bench, as SVG files into
    a folder. Return their titles by path, and what others wait for, by name."""
    from artifacts.store.store import Store
    from moectl.report.gallery import gallery
    from moectl.show.pictures import write_picture

    _bring_up_to_date(store)
    pictures = {}
    missing = {}
    with Store.open(store, read_only=True) as opened:
        asked = opened.run(run).info if run is not None else None
        job = asked and asked.parameters.get("job")
        model_id = asked and asked.model_id
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
    return pictures, missing


def _bring_up_to_date(path: Path) -> None:
    """Migrate an older store, whose missing tables the queries name. Opening it for writing copies
    it first."""
    from artifacts.store.schema import ARTEFACT_TABLES
    from artifacts.store.store import Store

    with Store.open(path, read_only=True) as opened:
        tables = opened.columns().keys()
    if not ARTEFACT_TABLES.keys() <= tables:
        Store.open(path).close()
