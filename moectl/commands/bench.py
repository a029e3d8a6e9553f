"""`moectl bench`: presets beside each other at every budget, over every link: speed next to quality."""

from pathlib import Path

from moectl.benchlive import live
from moectl.benchreplay import simulated
from moectl.benchrequest import Request
from moectl.benchviews import Benched, sheets
from moectl.bundled import demo_model
from moectl.render import show_json, show_sheet

BUNDLED = "bundled"


def bench(name: str | None, request: Request, *, store: Path, device: str, threads: int) -> Benched:
    """Measure, or simulate, what `request` asks for on the model `name`, a folder or hub id (None: the bundled one).

    What is finished is in the store at once, and the same command goes on from there.
    """
    model = str(demo_model()) if name in (None, BUNDLED) else name
    return (simulated if request.simulate else live)(model, request, store=store, device=device, threads=threads)


def show(benched: Benched, *, as_json: bool) -> None:
    """Print the table, or one JSON object."""
    if as_json:
        show_json(benched.records())
        return
    for sheet in sheets(benched):
        show_sheet(sheet)
