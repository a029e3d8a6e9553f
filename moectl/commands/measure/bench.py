"""`moectl bench`: measure presets beside each other at every budget and over every link, speed next
to quality."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import Incompatible
from moectl.bench.options import BenchOptions
from moectl.bundled import demo_model
from moectl.cli.groups import fill
from moectl.cli.options import Json, Model, StorePath
from moectl.commands.measure.report import check_report, write_page
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from moectl.bench.request import BenchRequest


@resumable("what was measured is kept")
def bench(
    *,
    model: Model = None,
    options: BenchOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Compare presets: speed next to quality.

    Stopped half-way, the same command goes on.
    """
    with importing():
        from moectl.bench.live import live
        from moectl.bench.other_tools import keep, read_results
        from moectl.bench.request import BenchRequest, names_of
        from moectl.bench.sheets import sheets
        from moectl.bench.simulated import simulated
        from moectl.shared.terminal.progress import Phases
        from moectl.show.render import show_json, show_sheet
        from runtime.session.presets import find_presets

    stored = find_presets(names_of(options.presets, "--presets"), store)
    request = fill(BenchRequest, options, stored=stored)
    page = options.report
    if page:
        check_report(page)
    name = model or str(demo_model())
    if not request.simulate:  # a replay counts in its trace what the store lacks
        _check_any_runs(request, name, store)
    imported = [read_results(path) for path in options.results or ()]
    measure = simulated if request.simulate else live
    with Phases(1, 1, 18, is_quiet=json) as phases:
        benched = measure(name, request, phases, store=store)
    rows = [row for result in imported for row in keep(result, store=store)]
    notes = (*benched.notes, *(result.note for result in imported))
    if page and benched.has_run:
        write_page(page, store=store, job=benched.job)
        notes += (f"report: {page}",)
    benched = replace(benched, rows=[*benched.rows, *rows], notes=notes)
    if json:
        show_json(benched.records())
        return
    for sheet in sheets(benched):
        show_sheet(sheet)


def _check_any_runs(request: "BenchRequest", name: str, store: Path) -> None:
    """Raise Incompatible where the store lacks what each of the presets requires; where some can
    run, the others have their reason in the table."""
    from runtime.policies import build
    from runtime.policies.presets import preset
    from runtime.session.presets import check_stored

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
