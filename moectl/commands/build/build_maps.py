"""`moectl build-maps`: run requests through the model and keep their iterations as expert maps
(fMoE)."""

from pathlib import Path

from moectl.shared.build_on_text import BuildRequest, build_on_text
from moectl.show.render import NumBytes, Sheet, fewer, show_json, show_sheet
from profilers.routing.maps import BuiltMaps, ExpertMapPlan, build_maps
from runtime.session.settings import Settings


def build(
    name: str | None, settings: Settings, request: BuildRequest[ExpertMapPlan], *, store: Path
) -> BuiltMaps:
    """Run the model `name` (None: the bundled one) over the text as requests, and write its expert
    maps.

    Raises BadUsage (distance, dtype), BadInput (model, data, store) and OutOfResources (capacity).
    """
    return build_on_text(name, settings, request, build_maps, store=store, doing="running requests")


def show(built: BuiltMaps, *, as_json: bool) -> None:
    """Print how many maps there are, of how many iterations, and their bytes."""
    sheet = summary(built)
    if as_json:
        [record] = sheet.records()
        show_json(
            {
                "run": built.run_id,
                **record,
                "dtype": built.maps.dtype,
                "seconds": built.seconds,
                "shortfall": built.shortfall,
            }
        )
    else:
        show_sheet(sheet)


def summary(built: BuiltMaps) -> Sheet:
    maps = built.maps
    row = (
        len(maps),
        maps.capacity,
        maps.distance,
        built.num_requests,
        built.num_iterations,
        maps.num_replaced,
        NumBytes(maps.nbytes),
        NumBytes(maps.capacity * maps.map_nbytes),
    )
    columns = (
        "maps",
        "capacity",
        "distance",
        "requests",
        "iterations",
        "replaced",
        "bytes",
        "bytes when full",
    )
    note = (
        f"run {built.run_id}: {built.num_tokens:,} tokens in {built.seconds:.1f} "
        f"s{fewer(built.shortfall)}"
    )
    return Sheet("Expert maps", columns, [row], note)
