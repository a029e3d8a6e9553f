"""`moectl profile` and `moectl merge`: record what a model's routers select over text, into the
store."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from artifacts.errors import BadUsage
from moectl.bundled import demo_model
from moectl.shared.opening import model_info, open_quietly
from moectl.shared.progress import Phases, progress_bar
from moectl.shared.resuming import resumable
from moectl.shared.stores import check_store, foresight_for
from moectl.shared.text import read_data
from moectl.show.render import Sheet, fewer, show_json, show_sheet
from profilers.routing.profile import Profiled, profile_routing
from profilers.routing.shards import merge_shards
from profilers.text.batches import Batching
from profilers.text.corpus import documents
from profilers.workers.choose import LOCAL, check_device, check_executor, executing, is_spread
from runtime.session.session import Session, Settings


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Request for a profile: the text, the number of its tokens, and the batching."""

    data: str
    tokens: int
    batching: Batching
    seed: int = 0
    trace: bool = False
    distance: int = 1  # layers ahead that the trace records predictions for
    samples: int = 0  # tokens on which experts are tried in place of each other
    jobs: int | None = None  # worker processes; None with the local executor: this process alone
    executor: str = LOCAL

    def __post_init__(self) -> None:
        check_executor(self.executor)

    @property
    def is_spread(self) -> bool:
        return is_spread(self.executor, self.jobs)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/N`, i from 1, into an index from 0 and a count."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise BadUsage(f"shard {text!r} is not understood: write i/N, as 1/4")
    return int(index) - 1, int(count)


@resumable("batches that were counted are kept")
def profile(
    name: str | None, settings: Settings, request: ProfileRequest, *, store: Path
) -> Profiled:
    """Profile the model `name`, a folder or hub id (None: the bundled one), through the engine at
    its budget."""
    name = name or str(demo_model())
    check_store(store)
    documents(request.data)  # a wrong path is reported before a model is opened
    with Phases(1, 19) as phases:
        phases.begin("opening the model")
        opened = open_quietly(name, device=settings.device)
        if request.is_spread:
            check_device(opened)
            # as in every worker: the numbers must not depend on their number
            settings = replace(settings, threads=1)
        with Session(opened, settings) as session:
            phases.begin(f"profiling on {request.tokens:,} tokens")
            return profile_opened(name, session, request, store=store)


def profile_opened(
    name: str, session: Session, request: ProfileRequest, *, store: Path
) -> Profiled:
    data = read_data(
        session.opened,
        request.data,
        length=request.batching.length,
        num_tokens=request.tokens,
        seed=request.seed,
    )
    info = model_info(name, session.opened)
    workers = executing(request.executor, request.jobs) if request.is_spread else nullcontext()
    with workers as executor, progress_bar("profiling", unit="tokens") as advance:
        return profile_routing(
            session,
            data,
            request.batching,
            model=info,
            store_path=store,
            keep_trace=foresight_for(session.opened, request.distance, store=store)
            if request.trace
            else None,
            num_samples=request.samples,
            executor=executor,
            progress=advance,
        )


def merge(shards: list[Path], *, store: Path) -> Profiled:
    """Merge shard runs of several stores into one profile."""
    return merge_shards(shards, into=store)


def show(profiled: Profiled, *, as_json: bool) -> None:
    """Print a table with a row for each layer, or one JSON object."""
    sheet = layer_sheet(profiled)
    if as_json:
        summary = {
            "run": profiled.run_id,
            "tokens": profiled.num_tokens,
            "seconds": profiled.seconds,
        }
        summary |= {"resumed_batches": profiled.resumed, "shortfall": profiled.shortfall}
        show_json(summary | {"layers": sheet.records()})
    else:
        show_sheet(sheet)


def layer_sheet(profiled: Profiled) -> Sheet:
    """Return how evenly each layer uses its experts and how undecided its router is."""
    rows = []
    for layer, use in enumerate(profiled.profile.use):
        share = np.sort(use.sum(axis=0))[::-1] / max(1, use.sum())
        active = share[share > 0]
        evenness = -(active * np.log(active)).sum() / np.log(len(share)) if len(share) > 1 else 0.0
        quarter = share[: max(1, len(share) // 4)].sum()
        median = float(profiled.profile.entropy[layer].percentiles()[50])
        rows.append((layer, int((share > 0).sum()), evenness, quarter, median))
    columns = (
        "layer",
        "experts used",
        "evenness of use",
        "share of the busiest quarter",
        "median token entropy",
    )
    note = (
        f"run {profiled.run_id}: {profiled.num_tokens:,} tokens in {profiled.seconds:.1f} "
        f"s{fewer(profiled.shortfall)}"
    )
    return Sheet("Routing profile", columns, rows, note)
