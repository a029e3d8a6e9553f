"""`moectl bench`: measure presets beside each other at every budget and over every link, speed next
to quality."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from artifacts.errors import Incompatible
from moectl.bench.live import live
from moectl.bench.other_tools import keep, read_results
from moectl.bench.request import BenchRequest, names_of
from moectl.bench.sheets import sheets
from moectl.bench.simulated import simulated
from moectl.bench.table import Benched
from moectl.bundled import demo_model
from moectl.commands.measure.report import check_report, report
from moectl.shared.progress import Phases
from moectl.shared.resuming import resumable
from moectl.show.render import show_json, show_sheet
from runtime.policies import build
from runtime.policies.presets import Preset, preset
from runtime.session.presets import check_stored, find_presets


def stored_among(listed: str, store: Path) -> dict[str, Preset]:
    """Return the presets of the list that were tuned into the store."""
    return find_presets(names_of(listed, "--presets"), store)


@resumable("what was measured is kept")
def bench(
    name: str | None,
    request: BenchRequest,
    *,
    store: Path,
    device: str,
    threads: int,
    results: Sequence[Path] = (),
    page: Path | None = None,
    is_quiet: bool = True,
) -> Benched:
    """Measure or simulate the request's settings on the model `name`, a folder or hub id (None: the
    bundled one).

    Finished settings are in the store at once, and the same command resumes from there. `results`
    are files of other tools; their rows come last. With `page` the report of this bench is written
    there. Unless `is_quiet`, phases are told on stderr.
    """
    if page:
        check_report(page)
    model = name or str(demo_model())
    if not request.simulate:  # a replay counts in its trace what the store lacks
        _check_any_runs(request, model, store)
    imported = [read_results(path) for path in results]
    measure = simulated if request.simulate else live
    with Phases(1, 1, 18, is_quiet=is_quiet) as phases:
        benched = measure(model, request, phases, store=store, device=device, threads=threads)
    rows = [row for result in imported for row in keep(result, store=store)]
    notes = (*benched.notes, *(result.note for result in imported))
    if page and benched.has_run:
        notes += (f"report: {report(page, store=store, job=benched.job).path}",)
    return replace(benched, rows=[*benched.rows, *rows], notes=notes)


def _check_any_runs(request: BenchRequest, name: str, store: Path) -> None:
    """Raise Incompatible where the store lacks what each of the presets requires; where some can
    run, the others have their reason in the table."""
    missing = []
    for asked in request.asked:
        try:
            if asked not in request.peer_names:
                policies = build(preset(request.stored.get(asked, asked)).texts())
                check_stored(policies, store, name=name, base=request.base)
        except Incompatible as problem:
            missing.append(problem)
    if len(missing) == len(request.asked) and missing:
        raise missing[0]


def show(benched: Benched, *, as_json: bool) -> None:
    """Print the table, or one JSON object."""
    if as_json:
        show_json(benched.records())
        return
    for sheet in sheets(benched):
        show_sheet(sheet)
