"""Run a model over text and build an artefact from its routing: expert maps, predictors."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moectl.bundled import demo_model
from moectl.shared.opening import model_info, open_quietly
from moectl.shared.stores import check_store
from moectl.shared.terminal.progress import Phases, progress_bar
from moectl.shared.terminal.resuming import resumable
from moectl.shared.text import read_data
from profilers.text.batches import Batching
from profilers.text.corpus import documents
from runtime.session.session import Session, Settings

Built = TypeVar("Built")


@resumable()
def build_on_text(
    name: str | None,
    settings: Settings,
    builder: Callable[..., Built],
    batching: Batching,
    plan: object,
    *,
    data: str,
    tokens: int,
    requests: int | None = None,
    seed: int,
    store: Path,
    doing: str,
) -> Built:
    """Run the model `name`, a folder or hub id (None: the bundled one), at its budget, over at most
    `tokens` tokens of the text `data` in at most `requests` sequences, and let `builder` write the
    artefact of the plan. `doing` names that phase.

    Raises BadInput (model, data, store) and what `builder` raises.
    """
    name = name or str(demo_model())
    check_store(store)
    documents(data)  # a wrong path is reported before a model is opened
    with Phases(1, 19) as phases:
        phases.begin("opening the model")
        with Session(open_quietly(name, device=settings.device), settings) as session:
            text = read_data(
                session.opened,
                data,
                length=batching.length,
                num_tokens=tokens,
                seed=seed,
                at_most=requests,
            )
            model = model_info(name, session.opened)
            phases.begin(f"{doing}, at most {tokens:,} tokens")
            with progress_bar(doing, unit="tokens") as advance:
                return builder(
                    session,
                    text,
                    batching,
                    plan,
                    model=model,
                    store_path=store,
                    progress=advance,
                )
