"""The page: head, sections, and the receipt of the runs behind its numbers."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from html import escape
from importlib.resources import files

from artifacts.store.runs import versions
from artifacts.store.store import Store
from moectl.bundled import is_bundled
from moectl.report import queries
from moectl.report.chapters import Chapter, chapters
from moectl.report.environment import environment, title
from moectl.report.markup import Column, Section, code, data, section, short, table, whole
from moectl.report.reading import ReportSource

_TABLES = ("activations", "coactivations", "similarity", "quant_loss", "splits")
_OF_A_MODEL = re.compile(r"<code>moectl (profile|quantize|bench|tune)\b")
_RUNS_TITLE = "Runs behind these numbers"
_RUNS = (
    Column("command", "command"),
    Column("runs", "runs", whole),
    Column("newest", "newest", whole, "its number in the store"),
    Column("data", "data"),
    Column("tokens", "tokens", whole),
    Column("seed", "seed", whole),
    Column("seconds", "seconds", short),
    Column("started (UTC)", "started"),
)


def render(store: Store, *, job: str | None = None, model_id: str | None = None) -> str:
    """The page of `model_id`, by default the model of the newest bench; `job` is the bench that
    leads it."""
    source = ReportSource(store, job=job, model_id=model_id)
    parts = [
        Chapter("", [environment(source)]),
        *chapters(source),
        Chapter("Receipt", [_receipt(source)]),
    ]
    name = title(source)
    date = _date(source)
    style = "".join(
        files(f"moectl.{room}").joinpath(file).read_text(encoding="utf-8")
        for room, file in (("show", "charts.css"), ("report", "style.css"))
    )
    named = _named(source)
    body = "".join(_chapter(part, named) for part in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}, {date}: moectl report</title>"
        f'<link rel="icon" href="data:,"><style>{style}</style></head>'
        f'<body><main><header><h1>{escape(name)}</h1><p class="quiet">moectl report, {date}</p>'
        f'<nav aria-label="Sections">{"".join(map(_links, parts))}</nav></header>'
        f"{body}</main></body></html>\n"
    )


def _date(source: ReportSource) -> str:
    """The day of the newest run."""
    return source.rows(queries.NEWEST_DAY)[0]["day"] or "no date"


def _links(chapter: Chapter) -> str:
    links = " ".join(
        f'<a href="#{escape(part.key)}">{escape(part.title)}</a>' for part in chapter.sections
    )
    return f"<p>{f'<b>{escape(chapter.title)}</b> ' if chapter.title else ''}{links}</p>"


def _chapter(chapter: Chapter, named: Callable[[Section], Section]) -> str:
    heading = f'<h2 class="chapter">{escape(chapter.title)}</h2>' if chapter.title else ""
    return heading + "".join(section(named(part)) for part in chapter.sections)


def _named(source: ReportSource) -> Callable[[Section], Section]:
    """A function that adds the model to the commands in a section; without it they would use the
    bundled model."""
    names = [str(row["name"]) for row in source.models]
    name = "" if not names or is_bundled(names[0]) else f" {escape(shlex.quote(names[0]))}"
    return lambda part: replace(
        part, missing=_OF_A_MODEL.sub(lambda verb: verb[0] + name, part.missing)
    )


def _receipt(source: ReportSource) -> Section:
    runs = sorted({run for run in map(source.newest, _TABLES) if run is not None})
    asked = queries.filled(queries.RECEIPT, runs=runs, jobs=[bench.digest for bench in source.jobs])
    rows = source.rows(asked)
    if not rows:
        return Section(
            "receipt",
            _RUNS_TITLE,
            missing="Nothing was run yet: <code>moectl profile</code> begins.",
        )
    details = "".join(
        f"<dt>{escape(row['command'])}, run {data(row['newest'], whole)}</dt>"
        f"<dd>{code(row['parameters'])}</dd><dt>versions</dt><dd>{code(row['versions'])}</dd>"
        for row in rows
    )
    inside = (
        f"{table(rows, _RUNS, label='Runs')}<details><summary>Options in force, and "
        "versions</summary>"
    )
    made = (
        '<p class="quiet">Page by moectl '
        f"{escape(versions().get('moectl', '(not installed)'))}.</p>"
    )
    return Section("receipt", _RUNS_TITLE, f"{inside}<dl>{details}</dl></details>{made}", (asked,))
