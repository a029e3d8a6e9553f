"""`moectl simulate --reproduce PAPER`: the paper's figures beside moectl's."""

from collections.abc import Callable
from pathlib import Path

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from moectl.shared.terminal.resuming import resumable
from moectl.show.render import show_json, show_sheet
from tools.reproductions.buddymoe import reproduce as buddymoe
from tools.reproductions.contextaware import reproduce as contextaware
from tools.reproductions.fmoe import reproduce as fmoe
from tools.reproductions.moepic import hit_rates as moepic
from tools.reproductions.moepic import system as moepicsystem
from tools.reproductions.report import Reproduction
from tools.reproductions.specmd import reproduce as specmd

REPRODUCTIONS: dict[str, Callable[[Path | None], Reproduction]] = {
    "moepic-table1": moepic.reproduce,
    "moepic": moepicsystem.reproduce,
    "specmd": specmd.reproduce,
    "buddymoe": buddymoe.reproduce,
    "context-aware": contextaware.reproduce,
    "fmoe": fmoe.reproduce,
}


@resumable()
def reproduce(name: str, *, trace: Path | None = None, other_options: bool) -> Reproduction:
    """Run the reproduction of that name; what it measures on recorded routing, on the `trace` of a
    user too.

    Raises BadUsage for an unknown name, or with options that would make it another experiment, and
    BadInput for a trace that it cannot use.
    """
    if name not in REPRODUCTIONS:
        raise BadUsage(unknown("reproduction", name, REPRODUCTIONS))
    if other_options:
        raise BadUsage(
            "--reproduce brings its own trace, model and machine: give it no others but a recorded "
            "trace, --trace FILE"
        )
    return REPRODUCTIONS[name](trace)


def show(reproduction: Reproduction, *, as_json: bool) -> None:
    """Print tables, claims and why they disagree, how much of the paper is available to compare
    with, and assumptions."""
    claims = reproduction.claim_sheet()
    if as_json:
        tables = {key: sheet.records() for key, sheet in reproduction.sheets.items()}
        head = {"name": reproduction.name, "paper": reproduction.paper}
        notes = {
            "reasons": reproduction.reasons(),
            "counted": reproduction.counted,
            "available": reproduction.available,
            "assumed": reproduction.assumed,
        }
        show_json(head | tables | {"claims": claims.records()} | notes)
        return
    for sheet in (*reproduction.sheets.values(), claims):
        show_sheet(sheet)
    for line in reproduction.reasons():
        print(f"why: {line}")
    print(reproduction.counted)
    print(f"of the paper are available here: {reproduction.available}")
    for line in reproduction.assumed:
        print(f"assumed: {line}")
