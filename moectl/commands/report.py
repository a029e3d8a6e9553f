"""`moectl report`: what a store knows of a model, as one self-contained page or as a folder of
pictures."""

from dataclasses import asdict, dataclass
from pathlib import Path

from artifacts.common.files import check_writable, replacing
from artifacts.errors import BadUsage, Incompatible
from artifacts.store.schema import ARTEFACT_TABLES
from artifacts.store.store import Store
from moectl.charts.pictures import write_picture
from moectl.report.gallery import gallery
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
        raise BadUsage(
            f"a report is an HTML page: name it {path.stem or 'report'}.html, not {path.name!r}"
        )
    check_writable(path)


def report(path: Path, *, store: Path, job: str | None = None, run: int | None = None) -> Reported:
    """Write the page of a model: the model of the run, else the model of the newest bench in the
    store.

    `job` names the bench that comes first. A run of a bench names its own; otherwise it is the
    newest live one.
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Pictures that were written, by path with their titles, and what others wait for, by name."""

    pictures: dict[str, str]
    missing: dict[str, str]


def draw(folder: Path, *, store: Path, run: int | None = None) -> Drawn:
    """Write the store's knowledge of a model, of the run or of the newest bench, as SVG files into
    a folder."""
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
            write_picture(picture.drawing, folder / f"{picture.name}.svg")
            pictures[str(folder / f"{picture.name}.svg")] = picture.drawing.title
    if not pictures:
        raise Incompatible(
            f"{store} holds nothing to draw: `moectl bench` and `moectl profile --trace` make some"
        )
    return Drawn(pictures, missing)


def show_drawn(drawn: Drawn, *, as_json: bool) -> None:
    """Print the pictures, and what is missing."""
    if as_json:
        show_json(asdict(drawn))
        return
    for path, title in drawn.pictures.items():
        console().print(f"{path}: {title}", markup=False)
    for name, why in drawn.missing.items():
        console().print(f"no {name}.svg: it needs {why}", markup=False)


def _bring_up_to_date(path: Path) -> None:
    """Migrate an older store, whose missing tables the queries name. Opening it for writing copies
    it first."""
    with Store.open(path, read_only=True) as opened:
        tables = opened.columns().keys()
    if not ARTEFACT_TABLES.keys() <= tables:
        Store.open(path).close()


def show(reported: Reported, *, as_json: bool) -> None:
    """Print the path of the page, or one JSON object."""
    if as_json:
        show_json({"path": str(reported.path), "nbytes": reported.nbytes})
    else:
        line = f"{reported.path}: {human_bytes(reported.nbytes)}, one page that needs nothing else"
        console().print(line, markup=False)
