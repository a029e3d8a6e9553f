"""Run a model over text and build an artefact from its routing: expert maps, predictors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from moectl.bundled import demo_model
from moectl.shared.opening import model_info, open_quietly
from moectl.shared.progress import Phases, progress_bar
from moectl.shared.resuming import resumable
from moectl.shared.stores import check_store
from moectl.shared.text import read_data
from profilers.text.batches import Batching
from profilers.text.corpus import documents
from runtime.session.session import Session, Settings

Plan = TypeVar("Plan")
Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class BuildRequest(Generic[Plan]):
    """Request for an artefact: its plan, and the text to build it from, at most `tokens` tokens in
    at most `requests` sequences."""

    plan: Plan
    data: str
    tokens: int
    batching: Batching
    requests: int | None = None
    seed: int = 0


@resumable()
def build_on_text(
    name: str | None,
    settings: Settings,
    request: BuildRequest,
    builder: Callable[..., Built],
    *,
    store: Path,
    doing: str,
) -> Built:
    """Run the model `name`, a folder or hub id (None: the bundled one), at its budget, and let
    `builder` write the artefact. `doing` names that phase.

    Raises BadInput (model, data, store) and what `builder` raises.
    """
    name = name or str(demo_model())
    check_store(store)
    documents(request.data)  # a wrong path is reported before a model is opened
    with Phases(1, 19) as phases:
        phases.begin("opening the model")
        with Session(open_quietly(name, device=settings.device), settings) as session:
            data = read_data(
                session.opened,
                request.data,
                length=request.batching.length,
                num_tokens=request.tokens,
                seed=request.seed,
                at_most=request.requests,
            )
            model = model_info(name, session.opened)
            phases.begin(f"{doing}, at most {request.tokens:,} tokens")
            with progress_bar(doing, unit="tokens") as advance:
                return builder(
                    session,
                    data,
                    request.batching,
                    request.plan,
                    model=model,
                    store_path=store,
                    progress=advance,
                )
