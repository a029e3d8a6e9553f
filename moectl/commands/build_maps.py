"""`moectl build-maps`: requests run through the model, their iterations kept as expert maps in the store (fMoE)."""

from dataclasses import dataclass
from pathlib import Path

from moectl.bundled import demo_model
from moectl.commands.profile import Request as Text
from moectl.commands.profile import read_data
from moectl.shared.opening import check_store, model_info, open_quietly
from moectl.shared.progress import progress_bar
from moectl.show.render import NumBytes, Sheet, show_json, show_sheet
from profilers.routing.maps import BuiltMaps, Plan, build_maps
from profilers.text.batches import Batching, Data
from profilers.text.corpus import documents
from runtime.session.session import Session, Settings


@dataclass(frozen=True, slots=True)
class Request:
    """The store of maps that is asked for, and what it is filled from: text as requests, at most `requests` of them."""

    plan: Plan
    data: str
    tokens: int
    batching: Batching
    requests: int | None = None
    seed: int = 0


def build(name: str | None, settings: Settings, request: Request, *, store: Path) -> BuiltMaps:
    """Run the model `name`, a folder or hub id (None: the bundled one), at its budget, and write its maps.

    Raises BadUsage (distance, dtype), BadInput (model, data, store) and OutOfResources (capacity).
    """
    name = name or str(demo_model())
    check_store(store)
    documents(request.data)  # what leads nowhere is told before a model is opened
    with Session(open_quietly(name, device=settings.device), settings) as session:
        text = read_data(session.opened, Text(request.data, request.tokens, request.batching, seed=request.seed))
        data = Data(text.spec, text.sequences[: request.requests], text.seed)
        with progress_bar("running requests", unit="tokens") as advance:
            return build_maps(
                session,
                data,
                request.batching,
                request.plan,
                model=model_info(name, session.opened),
                store_path=store,
                progress=advance,
            )


def show(built: BuiltMaps, *, as_json: bool) -> None:
    """Print how many maps there are, of how many iterations, and what they take."""
    sheet = summary(built)
    if as_json:
        [record] = sheet.records()
        show_json({"run": built.run_id, **record, "dtype": built.maps.dtype, "seconds": built.seconds})
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
    columns = ("maps", "capacity", "distance", "requests", "iterations", "replaced", "bytes", "bytes when full")
    note = f"run {built.run_id}: {built.num_tokens:,} tokens in {built.seconds:.1f} s"
    return Sheet("Expert maps", columns, [row], note)
