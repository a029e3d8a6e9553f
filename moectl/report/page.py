"""The page: head, sections, and the receipt of the runs behind its numbers."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files

from artifacts.store.runs import versions
from artifacts.store.store import Store
from moectl.bundled import is_bundled
from moectl.report import queries
from moectl.report.benchparts import bench_sections
from moectl.report.markup import Column, Section, code, data, nbytes, query_details, section, short, table, whole
from moectl.report.modelparts import model_sections
from moectl.report.reading import ReportSource

_TABLES = ("activations", "coactivations", "similarity", "quant_loss", "splits")
_OF_A_MODEL = re.compile(r"<code>moectl (profile|quantize|bench|tune)\b")
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
    """The page of `model_id`, by default the model of the newest bench; `job` is the bench that leads it."""
    source = ReportSource(store, job=job, model_id=model_id)
    named = _named(source)
    sections = [named(part) for part in (*bench_sections(source), *model_sections(source), _receipt(source))]
    title, head = _head(source)
    style = "".join(
        files(f"moectl.{room}").joinpath(name).read_text(encoding="utf-8")
        for room, name in (("show", "charts.css"), ("report", "style.css"))
    )
    links = "".join(f'<a href="#{part.key}">{escape(part.title)}</a>' for part in sections)
    body = "".join(map(section, sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{style}</style></head>'
        f'<body><main><header>{head}<nav aria-label="Sections">{links}</nav></header>{body}</main></body></html>\n'
    )


def _head(source: ReportSource) -> tuple[str, str]:
    asked = queries.MODELS.format(model=source.model_id)
    models = source.rows(asked)
    if not models:
        return "moectl report", "<h1>moectl report</h1>"
    [model] = models
    name = str(model["name"]).rstrip("/").rsplit("/", 1)[-1]
    summary = (
        f"{escape(model['family'])}: {data(model['num_layers'], whole)} layers of {data(model['num_experts'], whole)} "
        f"experts ({data(model['expert_bytes'], nbytes)} each), {data(model['top_k'], whole)} a token"
    )
    return f"{name}: moectl report", f'<h1>{escape(name)}</h1><p class="quiet">{summary}</p>{query_details([asked])}'


def _named(source: ReportSource) -> Callable[[Section], Section]:
    """A function that adds the model to the commands in a section; without it they would use the bundled model."""
    names = [str(row["name"]) for row in source.rows(queries.MODELS.format(model=source.model_id))]
    name = "" if not names or is_bundled(names[0]) else f" {escape(shlex.quote(names[0]))}"
    return lambda part: replace(part, missing=_OF_A_MODEL.sub(lambda verb: verb[0] + name, part.missing))


def _receipt(source: ReportSource) -> Section:
    runs = sorted({run for run in map(source.newest, _TABLES) if run is not None})
    asked = queries.RECEIPT.format(
        runs=_listed(map(str, runs)), jobs=_listed(f"'{bench.digest}'" for bench in source.jobs)
    )
    rows = source.rows(asked)
    if not rows:
        return Section("receipt", "Receipt", missing="Nothing was run yet: <code>moectl profile</code> begins.")
    details = "".join(
        f"<dt>{escape(row['command'])}, run {data(row['newest'], whole)}</dt><dd>{code(row['parameters'])}</dd>"
        f"<dt>versions</dt><dd>{code(row['versions'])}</dd>"
        for row in rows
    )
    inside = f"{table(rows, _RUNS, label='Runs')}<details><summary>Options in force, and versions</summary>"
    made = f'<p class="quiet">Page by moectl {escape(versions().get("moectl", "(not installed)"))}.</p>'
    return Section("receipt", "Receipt", f"{inside}<dl>{details}</dl></details>{made}", (asked,))


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items) or "NULL"
