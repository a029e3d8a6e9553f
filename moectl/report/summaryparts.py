"""The section of a bench that says which preset to run, by budget."""

from html import escape

from moectl.report import queries
from moectl.report.markup import Section, code, data, percent, whole
from moectl.report.reading import Record, ReportSource, StoredBench
from moectl.show.grounds import Grounds, compared
from moectl.show.losses import LEAST_SCORED, is_distinguishable

_NEEDS_LIVE = "What a preset that alters the output loses, only a live bench can tell."


def summary(source: ReportSource, job: StoredBench) -> Section:
    asked = queries.filled(queries.SUMMARY, job=job.digest)
    cards = "".join(
        _card(row, source.heading(job, row), source.grounds(job, row["link"]))
        for row in source.rows(asked)
    )
    note = "" if job.is_live else f'<p class="quiet">{_NEEDS_LIVE}</p>'
    return Section(
        f"{job.mode}-summary", "What to run", f'{note}<div class="cards">{cards}</div>', (asked,)
    )


def _card(row: Record, heading: str, grounds: Grounds) -> str:
    is_absolute = grounds.is_absolute
    exact = row["exact_preset"]
    good = row["good_preset"]
    fast = row["fast_preset"]
    lines = []
    if exact is not None:
        lines.append(_line("Fastest with the full model's output", row, "exact", is_absolute))
    if good not in (None, exact):
        lines.append(
            _line(
                "Fastest within 1\N{NARROW NO-BREAK SPACE}% of perplexity", row, "good", is_absolute
            )
        )
    if fast not in (None, good, exact):
        lines.append(_line("Fastest of all", row, "fast", is_absolute))
    if exact not in (None, "on-demand") and row["plain_times"] is not None:
        lines.append(f"<li>For comparison {code('on-demand')}: {_beside(row['plain_times'])}</li>")
    if row["scored"] is not None:
        lines.append(
            "<li>None that alters the output is recommended: losses are of "
            f"{data(row['scored'], whole)} tokens, and take {LEAST_SCORED:,} to tell (a larger "
            f"{code('--tokens')})</li>"
        )
    says = f'<p class="quiet">{escape(grounds.says)}</p>'
    return (
        f'<article class="card"><h4>{escape(heading)}</h4>{says}<ul>{"".join(lines)}</ul></article>'
    )


def _line(what: str, row: Record, which: str, is_absolute: bool) -> str:
    loss = row.get(f"{which}_loss")
    error = row.get(f"{which}_error")
    times = (
        _beside(row[f"{which}_times"])
        if row[f"{which}_times"] is not None
        else "the time of full is not known"
    )
    ms = f", {data(row[f'{which}_ms'])} ms a token" if is_absolute else ""
    lost = f"; perplexity {_loss(loss, error)}" if loss is not None and which != "exact" else ""
    return f'<li>{what}<p class="big">{code(row[f"{which}_preset"])}</p>{times}{ms}{lost}</li>'


def _loss(loss: float, error: float) -> str:
    """A loss with its standard error, negative for a gain."""
    told = f"{data(loss, percent)} \N{PLUS-MINUS SIGN} {data(error, percent)}"
    if not is_distinguishable(loss, error):
        return f"not distinguishable from that of {code('full')} ({told})"
    return f"{told} worse"


def _beside(times: object) -> str:
    words = compared(float(times))
    return (
        f"{data(times, lambda _: words)} {'as' if words.startswith('as ') else 'than'} "
        f"{code('full')}"
    )
