"""The command line of `moectl doctor`."""

from moectl.cli.options import EngineOptions, Json, Model, StorePath
from moectl.shared.defaults import DEFAULT_STORE


def doctor(
    *,
    model: Model = None,
    engine: EngineOptions,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Say what this machine takes for a model and what stands in the way, and check a prediction on a short run."""
    from moectl.shared import installed

    installed.check()  # before the command imports packages that may be missing
    from moectl.commands import doctor as command

    diagnosis = command.doctor(
        model, budget=engine.budget, link=engine.link, device=engine.device, threads=engine.threads, store=store
    )
    command.show(diagnosis, as_json=json)
