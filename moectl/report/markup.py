"""Pieces of HTML: numbers with their exact value, tables, and the queries of a section."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moectl.show.render import human_bytes
from moectl.show.svg import exact

Record = Mapping[str, object]
Format = Callable[[object], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: heading, column of the query, format of its values, and the meaning of
    the heading."""

    heading: str
    name: str
    shown: Format | None = None
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page. `queries` return every number in `body`; without a body `missing` says
    how to make one."""

    key: str
    title: str
    body: str = ""
    queries: tuple[str, ...] = ()
    missing: str = ""


def short(value: object) -> str:
    """Three significant digits, or an integer from 1000 on."""
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def percent(value: object) -> str:
    return f"{100 * float(value):.1f}\N{NARROW NO-BREAK SPACE}%"


def ratio(value: object) -> str:
    return f"{float(value):.4f}"


def times(value: object) -> str:
    return f"{short(value)}\N{NARROW NO-BREAK SPACE}×"


def nbytes(value: object) -> str:
    return human_bytes(float(value)).replace(" ", "\N{NARROW NO-BREAK SPACE}")


def whole(value: object) -> str:
    return f"{int(value):,}"


def data(value: object, shown: Format = short) -> str:
    """Return a number in short form that carries its exact value; `unknown` for None."""
    if value is None:
        return "unknown"
    return f'<data value="{exact(value)}">{escape(shown(value))}</data>'


def code(text: object) -> str:
    return f"<code>{escape(str(text))}</code>"


def table(
    rows: Sequence[Record] | Mapping[str, Sequence[Record]],
    columns: Sequence[Column],
    *,
    label: str,
    has_cards: bool = False,
) -> str:
    """A table of rows, or of groups of rows by heading. Where it is too wide it scrolls sideways
    and its first column stays in view; with `has_cards` a narrow screen shows each row as a
    card."""
    groups = rows if isinstance(rows, Mapping) else {"": rows}
    bodies = "".join(_body(heading, own, columns) for heading, own in groups.items() if own)
    head = f"<thead><tr>{''.join(map(_heading, columns))}</tr></thead>"
    kind = ' class="as-cards"' if has_cards else ""
    inside = f'<table{kind}><caption class="hidden">{escape(label)}</caption>{head}{bodies}</table>'
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">{inside}</div>'
    )


def query_details(queries: Sequence[str]) -> str:
    """The queries, folded away, to repeat in DuckDB."""
    shown = "".join(
        f'<pre class="sql" tabindex="0"><code>{escape(query.strip())}</code></pre>'
        for query in queries
    )
    return f"<details><summary>Query</summary>{shown}</details>" if queries else ""


def section(part: Section) -> str:
    body = part.body or f'<p class="missing">{part.missing}</p>'
    queries = query_details(part.queries) if part.body else ""
    key = escape(part.key)
    heading = f'<h3 id="{key}-title">{escape(part.title)}</h3>'
    return f'<section id="{key}" aria-labelledby="{key}-title">{heading}{body}{queries}</section>'


def _body(heading: str, rows: Sequence[Record], columns: Sequence[Column]) -> str:
    over = (
        (
            '<tr class="over"><th scope="rowgroup" '
            f'colspan="{len(columns)}">{escape(heading)}</th></tr>'
        )
        if heading
        else ""
    )
    lines = "".join(
        f"<tr>{''.join(_cell(row[column.name], column) for column in columns)}</tr>" for row in rows
    )
    return f"<tbody>{over}{lines}</tbody>"


def _heading(column: Column) -> str:
    meaning = f' title="{escape(column.meaning)}"' if column.meaning else ""
    side = ' class="n"' if column.shown else ""
    return f'<th scope="col"{side}{meaning}>{escape(column.heading)}</th>'


def _cell(value: object, column: Column) -> str:
    label = f' data-label="{escape(column.heading)}"'
    if value is None:
        return f'<td class="n"{label}>–</td>'
    if column.shown is None:
        return f"<td{label}>{escape(str(value))}</td>"
    return f'<td class="n"{label}>{data(value, column.shown)}</td>'
