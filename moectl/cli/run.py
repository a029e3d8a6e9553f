"""The command line of `moectl run`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from artifacts.errors import BadUsage
from moectl.cli.groups import fill
from moectl.cli.options import (
    DEFAULT_THREADS,
    AvgBits,
    Base,
    Decide,
    Dense,
    Device,
    Devices,
    Experts,
    Json,
    Link,
    Model,
    PolicyOptions,
    PresetOptions,
    ReconfigureEvery,
    ScaledTo,
    StorePath,
    Threads,
    Verbose,
    Window,
)
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.importing import importing


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run that say how experts are reached and computed."""

    link: Link = "auto"
    near: Annotated[str | None, typer.Option(help="Emulate a near tier of this rate: 40GB/s.")] = (
        None
    )
    scaled_to: ScaledTo = None
    window: Window = None
    base: Base = 16
    dense: Dense = None
    experts: Experts = "exact"
    decide: Decide = "host"
    reconfigure_every: ReconfigureEvery = None
    device: Device = "auto"
    devices: Devices = 1
    threads: Threads = DEFAULT_THREADS


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of the sampler: the choice of the next token, and the end of the text."""

    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the most probable token.")] = (
        False
    )
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the N likeliest; 0: all.")] = 50
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest up to this.")] = 0.95
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 repeats less; else the model's.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of the text.")
    ] = False
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of what is drawn.", rich_help_panel="Sampling")
    ] = 0


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
