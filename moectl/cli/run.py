"""The command line of `moectl run`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from artifacts.errors import BadUsage
from moectl.cli.groups import fill
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
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


def run(
    *,
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option(help="The text to go on from; else it chats.")
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
    verify: Annotated[
        bool, typer.Option("--verify", help="Check replica files by their hashes first.")
    ] = False,
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
            from moectl.commands.start import run as command

        temperature = 0.0 if drawn.greedy else drawn.temperature
        sampling = fill(command.Sampling, drawn, temperature=temperature)
        request = command.RunRequest(
            prompt, settings, sampling, options.base, trace=trace, verbose=verbose, as_json=json
        )
        command.run_command(model, request, waiting, store=store)


def _check_turns(prompt: str | None, *, is_chat: bool, prompt_only: bool) -> None:
    """Raise BadUsage for options that do not go with a chat, which is what there is without a
    prompt."""
    if prompt is not None and is_chat:
        raise BadUsage("give either --prompt TEXT or --chat")
    if prompt is None and prompt_only:
        raise BadUsage("--json and --trace go with --prompt TEXT, not with a chat")
    if prompt is None and sys.stdin is None:
        raise BadUsage("a chat reads turns from stdin, which is closed: give --prompt TEXT")
