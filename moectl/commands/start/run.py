"""`moectl run`: generate from a prompt, or chat, with a model whose experts are offloaded; say what
that took."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from artifacts.common.files import check_writable
from artifacts.errors import BadUsage
from artifacts.store.runs import utc_now
from moectl.bundled import demo_model
from moectl.cli.options import (
    AvgBits,
    Json,
    Model,
    PolicyOptions,
    PresetOptions,
    RunOptions,
    SamplingOptions,
    StorePath,
    Verbose,
    Verify,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing

if TYPE_CHECKING:
    from runtime.session.generation.sampling import Sampling
    from runtime.session.session import Session


def run(
    *,
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The text to go on from; else it chats.")
    ] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="Chat, as without --prompt.")] = False,
    chosen: PresetOptions,
    policies: PolicyOptions,
    avg_bits: AvgBits = None,
    options: RunOptions,
    drawn: SamplingOptions,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the routing trace here, as Parquet.", rich_help_panel="Output"),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Add to the store's expert maps (fmoe).")
    ] = False,
    verify: Verify = False,
    store: StorePath = DEFAULT_STORE,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Generate text, or chat, with a model bigger than memory.

    Without --prompt it chats: turns from the terminal, or from stdin.
    """
    from moectl.show.waiting import loading

    _check_turns(prompt, is_chat=is_chat, prompt_only=json or trace is not None)
    given = policies.given(avg_bits)
    settings = chosen.settings(
        store, options, model=model, base=options.base, policies=given, verify=verify, learn=learn
    )
    with loading(model, preset=chosen.preset, budget=chosen.budget, is_quiet=json) as waiting:
        with importing(says=""):
            from artifacts.quantisation.replicas import check_base
            from moectl.generating.chat import chat
            from moectl.shared.opening import existing, open_quietly, open_session, settled

        sampling = drawn.sampling()
        check_base(options.base)
        if trace:
            check_writable(trace)
        if learn:
            from moectl.shared.stores import check_store

            check_store(store)
        name = model or str(demo_model())
        opened = open_quietly(name, device=settings.device, dense=settings.dense)
        choice = settled(opened, settings, existing(store))
        with open_session(
            opened, choice, store=existing(store), base=options.base, name=name
        ) as session:
            load_s = waiting.end()
            if not json:
                choice.tell()
            with keeping_maps(session, name, store=store):
                if prompt is None:
                    chat(session, sampling, load_s=load_s, verbose=verbose)
                    return
                _answer_prompt(
                    session,
                    prompt,
                    sampling,
                    trace=trace,
                    verbose=verbose,
                    as_json=json,
                    load_s=load_s,
                )


def _check_turns(prompt: str | None, *, is_chat: bool, prompt_only: bool) -> None:
    """Raise BadUsage for options that do not go with a chat, which is what there is without a
    prompt."""
    if prompt is not None and is_chat:
        raise BadUsage("give either --prompt TEXT or --chat")
    if prompt is None and prompt_only:
        raise BadUsage("--json and --trace go with --prompt TEXT, not with a chat")
    if prompt is None and sys.stdin is None:
        raise BadUsage("a chat reads turns from stdin, which is closed: give --prompt TEXT")


@contextmanager
def keeping_maps(session: "Session", name: str, *, store: Path) -> Iterator[None]:
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
    session: "Session", name: str, store: Path, started_at: datetime, seconds: float
) -> None:
    from moectl.shared.opening import model_info
    from runtime.session.learn_maps import write_learned_maps

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


def _answer_prompt(
    session: "Session",
    prompt: str,
    sampling: "Sampling",
    *,
    trace: Path | None,
    verbose: bool,
    as_json: bool,
    load_s: float,
) -> None:
    """Generate after the prompt and print the text as it comes, then one line on stderr; or all of
    it as JSON.

    Interrupted, it says what there is so far, and raises KeyboardInterrupt.
    """
    from moectl.show.answers import everything, in_a_line, show_details, tell_fallbacks
    from moectl.show.flow import flow
    from moectl.show.render import show_json

    recorder = session.record() if trace else None
    stream = session.stream(prompt, sampling)
    try:
        if not as_json:
            flow(stream, prompt=prompt)
        answer = stream.answer()
    except KeyboardInterrupt:
        stream.close()
        print(f"\n{in_a_line(stream.answer(), load_s=load_s)}", file=sys.stderr)
        if recorder:
            print(
                f"{trace} was not written: a trace is kept of whole answers",
                file=sys.stderr,
            )
        raise
    if recorder:
        # late, as the store: most runs write nothing
        from artifacts.traces.parquet import write_parquet

        write_parquet(recorder.trace(), trace)
    if as_json:
        show_json(everything(answer))
        return
    if verbose:
        show_details(answer.effort, answer.receipt, answer=answer)
    print(in_a_line(answer, load_s=load_s), file=sys.stderr)
    tell_fallbacks(answer.receipt["fallbacks"])
