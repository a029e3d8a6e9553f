"""The section of a report that compares buddies with controls as stand-ins for absent experts."""

from collections.abc import Sequence
from html import escape

from moectl.report import queries
from moectl.report.markup import Column, Section, code, data, percent, ratio, short, table, whole
from moectl.report.reading import Record, ReportSource, StoredBench, grouped, place

BUDDIES = "buddymoe"
_TITLE = "Buddies against controls"
_BENCH = "<code>moectl bench --presets buddymoe,buddymoe-random,buddymoe-best,buddymoe-zero</code>"
_COLUMNS = (
    Column("preset", "preset"),
    Column("replaced", "share", percent, "share of experts replaced or left out"),
    Column("KL", "kl", ratio, "nats a token, against the full model"),
    Column("perplexity ratio", "perplexity_ratio", ratio, "against the full model"),
    Column("KL, one replaced", "price", ratio, "nats of KL for one expert replaced of one token"),
    Column("more than buddies", "difference", ratio, "in KL for one replaced, paired by text"),
    Column("+-", "error", ratio, "standard error of that over the texts"),
    Column("texts", "texts", whole),
    Column("run", "run_id", whole, "of the store"),
)


def controls(source: ReportSource, job: StoredBench) -> Section:
    """The section on stand-ins, from a live bench."""
    asked = queries.filled(queries.STAND_IN_PRICES, job=job.digest)
    groups = [group for _, group in grouped(source.rows(asked), "budget", "link") if len(group) > 1]
    if not groups:
        return Section(
            "controls", _TITLE, missing=f"Not measured live in this bench: {_BENCH} does."
        )
    verdicts = "".join(f"<p>{_verdict(group)}</p>" for group in groups)
    parts = "".join(_part(place(group[0]), group) for group in groups)
    return Section("controls", _TITLE, f"{_RULE}{verdicts}{parts}", (asked,))


def _part(where: str, rows: Sequence[Record]) -> str:
    return f"<h4>{escape(where)}</h4>{table(rows, _COLUMNS, label=f'Stand-ins at {where}')}"


_RULE = (
    '<p class="quiet">Where an expert is absent, a buddy computes in its place. The controls put '
    "something else there: a resident expert drawn at random, the resident expert that the router "
    "rates highest, or nothing. Each preset replaces a slightly different share of experts, so the "
    "costs below are for one expert replaced of one token.</p>"
)


def _verdict(rows: Sequence[Record]) -> str:
    """The verdict in a sentence; rows of one budget over one link, the cheapest first."""
    best = rows[0]
    rival = (
        next(row for row in rows if row["preset"] != BUDDIES) if best["preset"] == BUDDIES else best
    )
    buddies = next(row for row in rows if row["preset"] == BUDDIES)
    is_told_apart = rival["error"] is not None and abs(rival["difference"]) > 2 * rival["error"]
    wins = "costs least" if is_told_apart else "costs least, within two standard errors of the next"
    return (
        f"{escape(place(best))}: {code(best['preset'])} {wins}. An expert replaced costs "
        f"{data(rival['price'], short)} nats with {code(rival['preset'])} and "
        f"{data(buddies['price'], short)} with buddies, a difference of "
        f"{data(rival['difference'], short)}"
        + (f" +- {data(rival['error'], short)}." if rival["error"] else ".")
    )
