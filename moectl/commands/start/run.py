"""`moectl run`: generate from a prompt, or chat, with a model whose experts are offloaded; say what
that took."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter

from artifacts.common.files import check_writable
from artifacts.quantisation.replicas import check_base
from artifacts.store.runs import utc_now
from moectl.bundled import demo_model
from moectl.generating.chat import chat
from moectl.shared.opening import existing, model_info, open_quietly
from moectl.shared.preset_choice import with_choice
from moectl.show.answers import everything, in_a_line, show_details, tell_fallbacks
from moectl.show.flow import flow
from moectl.show.render import show_json
from moectl.show.waiting import Waiting
from runtime.session.answers import Answer, Stream
from runtime.session.generate import Sampling
from runtime.session.learn_maps import write_learned_maps
from runtime.session.session import Session, Settings


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Request for a run: the prompt, the settings and the output. Without a prompt it is a chat."""

    prompt: str | None
    settings: Settings
    sampling: Sampling
    base: int
    trace: Path | None = None
    verbose: bool = False
    as_json: bool = False


def run_command(name: str | None, request: RunRequest, waiting: Waiting, *, store: Path) -> None:
    """Do all of `moectl run`: one prompt or a chat. `waiting` ends when the model is there."""
    check_base(request.base)
    if request.trace:
        check_writable(request.trace)
    if request.settings.learn:
        from moectl.shared.stores import check_store

        check_store(store)
    name = name or str(demo_model())
    with (
        opened_session(name, request, waiting, store=store) as (session, load_s),
        keeping_maps(session, name, store=store),
    ):
        if request.prompt is None:
            chat(session, request.sampling, load_s=load_s, verbose=request.verbose)
        else:
            answer_prompt(session, request, load_s=load_s)


@contextmanager
def opened_session(
    name: str, request: RunRequest, waiting: Waiting, *, store: Path
) -> Iterator[tuple[Session, float]]:
    """Yield a session for the request, and the seconds that it took from the start of the
    command."""
    opened = open_quietly(name, device=request.settings.device, dense=request.settings.dense)
    settings, why = with_choice(opened, request.settings, existing(store))
    with Session.over(
        opened, settings, store=existing(store), base=request.base, name=name
    ) as session:
        load_s = waiting.end()
        if why and not request.as_json:
            print(f"Preset {session.receipt()['preset']}: {why}", file=sys.stderr)
        yield session, load_s


@contextmanager
def keeping_maps(session: Session, name: str, *, store: Path) -> Iterator[None]:
    """Store the maps that the session has learned when the block ends, also after an interruption.

    Only whole iterations are stored. Nothing is stored if the checkpoint was written into, because
    the last map may be of two models.
    """
    started_at = utc_now()
    begin_s = perf_counter()
    try:
        yield
    finally:
        if session.parts.settings.learn:
            session.parts.tiers.slow.check_unchanged()
            _keep_maps(session, name, store, started_at, perf_counter() - begin_s)


def _keep_maps(
    session: Session, name: str, store: Path, started_at: datetime, seconds: float
) -> None:
    kept = write_learned_maps(
        session.parts.policies.matching.learned(),
        store_path=store,
        model=model_info(name, session.opened),
        began_with=session.parts.maps_run,
        started_at=started_at,
        seconds=seconds,
    )
    if kept is None:  # the run ended within its first pass, with a message of its own
        return
    others = (
        f"; run {kept.others} had learned meanwhile: its maps are among them" if kept.others else ""
    )
    line = (
        f"learned from {kept.num_iterations:,} iterations: run {kept.run_id} of {store} holds "
        f"{kept.num_maps:,} maps"
    )
    print(line + others, file=sys.stderr)


def answer_prompt(session: Session, request: RunRequest, *, load_s: float) -> None:
    """Generate after the prompt and print the text as it comes, then one line on stderr; or all of
    it as JSON.

    Interrupted, it says what there is so far, and raises KeyboardInterrupt.
    """
    recorder = session.record() if request.trace else None
    stream = session.stream(request.prompt, request.sampling)
    try:
        answer = _answered(stream, request)
    except KeyboardInterrupt:
        print(f"\n{in_a_line(stream.answer(), load_s=load_s)}", file=sys.stderr)
        if recorder:
            print(
                f"{request.trace} was not written: a trace is kept of whole answers",
                file=sys.stderr,
            )
        raise
    if recorder:
        # late, as the store: most runs write nothing
        from artifacts.traces.parquet import write_parquet

        write_parquet(recorder.trace(), request.trace)
    if request.as_json:
        show_json(everything(answer))
        return
    if request.verbose:
        show_details(answer.effort, answer.receipt, answer=answer)
    print(in_a_line(answer, load_s=load_s), file=sys.stderr)
    tell_fallbacks(answer.receipt["fallbacks"])


def _answered(stream: Stream, request: RunRequest) -> Answer:
    if not request.as_json:
        flow(stream, prompt=request.prompt)
    return stream.answer()
