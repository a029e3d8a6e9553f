"""The page of a report: sections in chapters, each a template filled with the rows of its
queries."""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from artifacts.store.store import Store
from moectl.report import queries
from moectl.report.reading import LIVE, SIMULATED, ReportSource, StoredBench
from moectl.report.sections import Section, Sections, template

_MODES = {LIVE: "Measured live", SIMULATED: "Simulated"}
# By name of the template: title, the table without which nothing is known, and queries by the names
# that the template calls their rows.
_OF_MODEL = {
    "use": ("Use of experts", "activations", {"rows": queries.USE}),
    "together": (
        "Experts selected together",
        "coactivations",
        {"rows": queries.TOGETHER, "pairs": queries.PAIRS},
    ),
    "standins": (
        "Stand-ins",
        "similarity",
        {"rows": queries.STANDINS, "best": queries.BEST_STANDINS},
    ),
    "loss": (
        "What few bits cost",
        "quant_loss",
        {"rows": queries.LOSS, "means": queries.LOSS_MEANS},
    ),
    "splits": ("Split experts", "splits", {"rows": queries.SPLITS}),
}


def render(store: Store, *, job: str | None = None, model_id: str | None = None) -> str:
    """The page of `model_id`, by default the model of the newest bench; `job` is the bench that
    leads it."""
    source = ReportSource(store, job=job, model_id=model_id)
    made = _chapters(Sections(source))
    chapters = {
        name: known for name, own in made.items() if (known := [one for one in own if one.is_known])
    }
    lacking = [one for own in made.values() for one in own if not one.is_known]
    script = _text("report", "report.js")
    return template("page").render(
        source=source,
        chapters=chapters,
        lacking=lacking,
        style=_text("charts", "charts.css") + _text("report", "style.css"),
        script=script,
        script_digest=b64encode(sha256(script.encode()).digest()).decode(),
        date=source.rows(queries.NEWEST_DAY)[0]["day"] or "no date",
    )


def _text(room: str, file: str) -> str:
    return files(f"moectl.{room}").joinpath(file).read_text(encoding="utf-8")


def _chapters(sections: Sections) -> dict[str, list[Section]]:
    """Return the sections by chapter, those of the leading bench first."""
    source = sections.source
    jobs = {bench.mode: bench for bench in source.jobs}
    modes = [*jobs, *(mode for mode in _MODES if mode not in jobs)]
    environment = {"rows": queries.MODELS, "benches": queries.CONDITIONS}
    imported = sections.fill("imported", "Other tools, on another text", {"rows": queries.IMPORTED})
    receipt = {"rows": queries.RECEIPT}
    return {
        "": [sections.fill("environment", "Environment and workload", environment)],
        **{_MODES[mode]: _of_bench(sections, mode, jobs.get(mode)) for mode in modes},
        "Other tools and tuned presets": [
            imported,
            _of_table(sections, "tuned", "Tuned presets", "presets", {"rows": queries.TUNED}),
        ],
        "The model": [_of_table(sections, kind, *each) for kind, each in _OF_MODEL.items()],
        "Receipt": [sections.fill("receipt", "Runs behind these numbers", receipt)],
    }


def _of_bench(sections: Sections, mode: str, job: StoredBench | None) -> list[Section]:
    if job is None:
        return [sections.fill("summary", "What to run", {}, key=f"{mode}-summary")]
    made = []

    def add(kind: str, title: str, key: str = "", **asked: str) -> None:
        made.append(sections.fill(kind, title, asked, key=key, job=job))

    source = sections.source
    marks = source.rows(queries.filled(queries.MARKS, job=job.digest))
    by = "against quality" if any(row["loss"] for row in marks) else "by preset"
    add("summary", "What to run", f"{mode}-summary", rows=queries.SUMMARY)
    add("front", f"Time {by}" if marks else "Time", f"{mode}-front", rows=queries.MARKS)
    add("bench", "Every row", f"{mode}-bench", rows=queries.TABLE, tasks=queries.TASKS)
    if job is source.jobs[0]:
        add("layers", "Layer by layer", rows=queries.LAYERS)
        add("prefetch", "Prefetching", rows=queries.PREFETCH)
    if job.is_live:
        add("controls", "Buddies against controls", rows=queries.STAND_IN_PRICES)
    return made


def _of_table(
    sections: Sections, kind: str, title: str, table: str, asked: dict[str, str]
) -> Section:
    """Fill a section with what the newest run of a table wrote."""
    run = sections.source.newest(table)
    return sections.fill(kind, title, {} if run is None else asked, run=run)
