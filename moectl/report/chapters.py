"""The chapters of a report, in order: measured live and simulated apart, other tools and tuned
presets, the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from moectl.report.controlparts import controls
from moectl.report.frontparts import front
from moectl.report.layerparts import layers, prefetching
from moectl.report.markup import Section
from moectl.report.modelparts import model_sections
from moectl.report.reading import LIVE, SIMULATED, ReportSource, StoredBench
from moectl.report.summaryparts import summary
from moectl.report.tableparts import every_row, imported, tuned

_TITLES = {LIVE: "Measured live", SIMULATED: "Simulated"}
_MISSING = {
    LIVE: "Nothing was measured live yet: <code>moectl bench --presets all</code> does it.",
    SIMULATED: (
        "Nothing was simulated yet: <code>moectl bench --presets all --simulate</code> does it."
    ),
}


@dataclass(frozen=True, slots=True)
class Chapter:
    """Sections under one title."""

    title: str
    sections: Sequence[Section]


def chapters(source: ReportSource) -> list[Chapter]:
    """The chapter of the leading bench first."""
    jobs = {job.mode: job for job in source.jobs}
    modes = [*jobs, *(mode for mode in _TITLES if mode not in jobs)]
    return [
        *(Chapter(_TITLES[mode], _of_bench(source, mode, jobs.get(mode))) for mode in modes),
        Chapter("Other tools and tuned presets", [*imported(source), tuned(source)]),
        Chapter("The model", model_sections(source)),
    ]


def _of_bench(source: ReportSource, mode: str, job: StoredBench | None) -> list[Section]:
    if job is None:
        return [Section(f"{mode}-summary", "What to run", missing=_MISSING[mode])]
    sections = [summary(source, job), front(source, job), every_row(source, job)]
    if job is source.jobs[0]:
        sections += [layers(source, job), prefetching(source, job)]
    return [*sections, controls(source, job)] if job.is_live else sections
