"""Opens what a server serves: a model, the scheduler of its requests, and the presets that clients
may switch to."""

from dataclasses import replace
from pathlib import Path

from artifacts.errors import OutOfResources
from moectl.serving.app import Serving
from moectl.serving.guard import TURNS, ServerLimits
from moectl.serving.request import ServeRequest
from moectl.serving.scheduler import Scheduler
from moectl.shared.opening import CONTEXT, Settled, existing, open_session, settled
from moectl.shared.text import tokenizer_of
from runtime.model.open import MoeModel
from runtime.policies import build
from runtime.policies.presets import Preset, preset, presets
from runtime.session.presets import tuned_presets
from runtime.session.session import Session
from runtime.session.settings import Settings


def open_serving(opened: MoeModel, name: str, request: ServeRequest, *, model: str) -> Serving:
    """Start the scheduler of a model that was opened by `name` and that clients call `model`."""
    tokenizer_of(opened)
    store = request.store
    choice = settled(
        opened,
        request.settings,
        existing(store),
        num_cached=_num_cached(request.limits),
        together=request.replicas or 1,
    )
    choice.tell()
    scheduler = scheduler_of(opened, name, choice, request.limits, store=store, base=request.base)
    scheduler.start()
    offers = offered(opened, choice.settings, store)
    return Serving(
        scheduler,
        model,
        offers,
        choice.why,
        aliases=request.served_model_name[1:],
        is_strict=request.strict,
    )


def _num_cached(limits: ServerLimits) -> int:
    """Return the tokens whose keys and values an automatic budget leaves room for."""
    return (limits.num_rows or TURNS) * min(CONTEXT, limits.num_positions or CONTEXT)


def scheduler_of(
    opened: MoeModel, name: str, choice: Settled, limits: ServerLimits, *, store: Path, base: int
) -> Scheduler:
    """Return a scheduler for the model and the presets of a store; the caller starts it."""
    settings = choice.settings
    choices = _presets(opened, settings, store)

    def open_chosen(name_of_preset: str) -> Session:
        own = replace(choice, settings=replace(settings, preset=choices[name_of_preset]))
        return open_session(opened, own, store=existing(store), base=base, name=name)

    return Scheduler(open_chosen, preset(settings.preset).name, limits)


def offered(opened: MoeModel, settings: Settings, store: Path) -> dict[str, str]:
    """Return a line about each preset that clients may switch to."""
    return {name: _line(chosen) for name, chosen in _presets(opened, settings, store).items()}


def _presets(opened: MoeModel, settings: Settings, store: Path) -> dict[str, Preset]:
    """Return the presets that can run live, the requested one among them."""
    tuned = [
        candidate for candidate in _tuned(store) if candidate.model_id == opened.fingerprint[:16]
    ]
    candidates = (*presets().values(), *tuned, preset(settings.preset))
    named = {candidate.name: candidate for candidate in candidates if not candidate.waits_for}
    return {
        name: chosen
        for name, chosen in named.items()
        if "next_use" not in build(chosen.texts()).requires
    }


def _tuned(store: Path) -> list[Preset]:
    """Return the tuned presets; none while another process holds the store, which the receipt
    tells."""
    try:
        return tuned_presets(store)
    except OutOfResources:
        return []


def _line(chosen: Preset) -> str:
    needs = ", ".join(sorted(build(chosen.texts()).requires))
    return f"{chosen.summary}; needs {needs}" if needs else chosen.summary
