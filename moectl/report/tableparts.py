"""Tables of benches: every row of one, scores of tasks, what other tools measured, and tuned
presets."""

from html import escape

from moectl.report import queries
from moectl.report.markup import Column, Section, nbytes, percent, ratio, short, table, times, whole
from moectl.report.reading import ReportSource, StoredBench, grouped
from moectl.show.grounds import measured

_RELATIVE = (
    Column(
        "time, full = 1",
        "times_full",
        times,
        "median time of a decoded token, over that of the preset full",
    ),
    Column("from", "times_lower", times, "first quartile over texts and rounds"),
    Column("to", "times_upper", times, "third quartile"),
)
_ABSOLUTE = (
    Column("ms a token", "tpot_ms", short, "median time of a decoded token"),
    Column("from", "tpot_lower", short, "first quartile over texts and rounds"),
    Column("to", "tpot_upper", short, "third quartile"),
    Column("full = 1", "times_full", times, "time over that of the preset full"),
    Column("tokens/s", "tokens_per_s", short),
)
_OF_ALL = (
    Column(
        "perplexity ratio",
        "perplexity_ratio",
        ratio,
        "over that of the full model on the same text",
    ),
    Column("+-", "error", ratio, "standard error of that ratio"),
    Column(
        "top-1", "top1_agreement", percent, "share of first choices that equal the full model's"
    ),
    Column("KL", "kl", ratio, "nats, against the full model"),
    Column("hit rate", "hit_rate", percent),
    Column("moved", "moved_bytes", nbytes, "bytes over the link, on demand and ahead of use"),
    Column("fast tier", "peak_fast_bytes", nbytes, "bytes of experts in the fast tier"),
)
_STALL = Column("stall ms", "exposed_ms", short, "time that compute waited for the link, in all")
_PROMPT_MS = Column("prompt ms", "ttft_ms", short, "time to the first token")
_PROMPT = Column(
    "prompt, full = 1", "times_full_ttft", times, "time to the first token, over that of full"
)
_IN_MS = (*_ABSOLUTE, *_OF_ALL, _STALL, _PROMPT_MS)
_IN_RATIOS = (*_RELATIVE, *_OF_ALL, _PROMPT)
_PRESET = Column("preset", "preset")
_IMPORTED = (
    Column("what", "preset"),
    Column("settings", "link"),
    Column("prompt ms", "ttft_ms", short),
    Column("ms a token", "tpot_ms", short),
    Column("tokens/s", "tokens_per_s", short),
    Column("run", "run_id", whole),
)
_TASKS = (
    _PRESET,
    Column("budget", "budget"),
    Column("link", "link"),
    Column("task", "task"),
    Column("metric", "metric"),
    Column("value", "value", ratio),
    Column("+-", "stderr", ratio, "standard error over the documents"),
    Column("documents", "count", whole),
    Column("run", "run_id", whole, "of the store"),
)
_TUNED = (
    Column("preset", "name"),
    Column("budget", "budget"),
    Column("machine", "machine"),
    Column("may lose", "max_loss", percent, "share of perplexity that it was allowed to lose"),
    Column("ms a token", "tpot_ms", short, "measured live"),
    Column("perplexity ratio", "perplexity_ratio", ratio, "measured live"),
    Column("+-", "error", ratio, "standard error of that ratio"),
    *(
        Column(axis, axis)
        for axis in ("routing", "prefetch", "eviction", "miss", "residency", "scope")
    ),
    Column("run", "run_id", whole),
)


_OUTPUTS = {
    "Same output as the full model": True,
    "Altered output": False,
    "Not counted what was altered": None,
}


def every_row(source: ReportSource, job: StoredBench) -> Section:
    """A table for each budget and link: presets that keep the full model's output, then the others,
    the fastest first."""
    asked = queries.filled(queries.TABLE, job=job.digest)
    rows = source.rows(asked)
    full = [row for row in rows if row["preset"] == "full"]
    parts = []
    for (_, link), same in grouped(
        [row for row in rows if row["preset"] != "full"], "budget", "link"
    ):
        grounds = source.grounds(job, link)
        columns = _IN_MS if grounds.is_absolute else _IN_RATIOS
        known = [
            column
            for column in columns
            if any(row[column.name] is not None for row in (*same, *full))
        ]
        heading = source.heading(job, same[0])
        groups = {
            **{
                title: [row for row in same if row["is_ours"] and row["is_lossless"] is kept]
                for title, kept in _OUTPUTS.items()
            },
            "For comparison": [*full, *(row for row in same if not row["is_ours"])],
        }
        shown = table(groups, (_PRESET, *known), label=heading, has_cards=job.is_live)
        parts.append(
            f'<h4>{escape(heading)}</h4><p class="quiet">{escape(grounds.says)}</p>{shown}'
        )
    scores, queried = _tasks(source, job)
    return Section(f"{job.mode}-bench", "Every row", "".join(parts) + scores, (asked, *queried))


def _tasks(source: ReportSource, job: StoredBench) -> tuple[str, tuple[str, ...]]:
    """Scores of a bench's tasks and their query; nothing where it has none."""
    asked = queries.filled(queries.TASKS, job=job.digest)
    label = "Tasks of lm-evaluation-harness"
    rows = source.rows(asked)
    return (f"<h4>{label}</h4>{table(rows, _TASKS, label=label)}", (asked,)) if rows else ("", ())


def imported(source: ReportSource) -> list[Section]:
    """Return the section on results of other tools, on another text; no section where there are
    none."""
    rows = source.rows(queries.IMPORTED)
    title = "Other tools, on another text"
    return (
        [Section("imported", title, table(rows, _IMPORTED, label=title), (queries.IMPORTED,))]
        if rows
        else []
    )


def tuned(source: ReportSource) -> Section:
    title = "Tuned presets"
    if source.newest("presets") is None:
        return Section(
            "tuned", title, missing="Not in this store yet: <code>moectl tune</code> makes them."
        )
    asked = queries.filled(queries.TUNED, model=source.model_id)
    rows = source.rows(asked)
    is_absolute = all(measured(row["machine"]).is_absolute for row in rows)
    columns = [column for column in _TUNED if is_absolute or column.name != "tpot_ms"]
    return Section("tuned", title, table(rows, columns, label=title), (asked,))
