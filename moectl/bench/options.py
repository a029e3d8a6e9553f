"""The options of `moectl bench` as they are typed. Imports nothing that takes long."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moectl.cli import completion
from moectl.cli.options import (
    DEFAULT_THREADS,
    Activations,
    Base,
    Clients,
    Data,
    Dense,
    Device,
    Devices,
    Draft,
    Executor,
    Experts,
    HalvedLength,
    KvCacheDtype,
    ScaledTo,
    Seed,
    Threads,
    known_machine,
    known_presets,
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a bench: the presets to measure, the text or trace to use, and the results to show
    beside them."""

    presets: Annotated[
        str,
        typer.Option(
            help=(
                "Presets, a,b,c, or all; full, uniform-bits, on-demand and near always stand "
                "beside."
            ),
            callback=known_presets,
            autocompletion=completion.listed(completion.presets),
        ),
    ] = "on-demand,near,shadow"
    budgets: Annotated[str, typer.Option(help="Budgets, each like --budget elsewhere.")] = (
        "12.5%,25%,50%"
    )
    links: Annotated[
        str,
        typer.Option(
            help="Links, each like --link elsewhere; with --simulate auto (the machine's) or rates."
        ),
    ] = "auto"
    scaled_to: ScaledTo = None
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="On a trace and virtual time: the oracle too, no quality."),
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(help="A Parquet trace; else the store's newest, or one recorded first."),
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(
            help="Whose bandwidths to simulate (a100-pcie4), or here: as profiled.",
            autocompletion=completion.machines,
            callback=known_machine,
        ),
    ] = None
    clients: Clients = None
    data: Data = "builtin:held-out"
    tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of it that each setting reads in a round.")
    ] = 768
    length: HalvedLength = 128
    rounds: Annotated[int, typer.Option(min=1, help="Times that each setting is measured.")] = 3
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what an earlier run has finished.")
    ] = False
    results: Annotated[
        list[Path] | None,
        typer.Option(
            "--import",
            help="Show what another tool measured too: llama-bench -o json, vllm bench serve.",
        ),
    ] = None
    report: Annotated[
        Path | None, typer.Option(help="Write it all as one HTML page, with charts.")
    ] = None
    peers: Annotated[
        str,
        typer.Option(
            help="Other programs beside them: transformers-eager, -batched, -grouped, "
            "accelerate-disk, -cpu, llama.cpp-bf16, -q8_0, -q4_0, -mxfp4, or all."
        ),
    ] = ""
    tasks: Annotated[
        str,
        typer.Option(
            help=(
                "Tasks of lm-evaluation-harness too: continuations, a YAML file, a folder of "
                "them, lm-eval:NAME."
            )
        ),
    ] = ""
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of --tasks at a time; else 64, or 1 where a preset alters the output.",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --simulate: settings at a time, each in a process of its own."
        ),
    ] = None
    executor: Executor = "local"
    base: Base = 16
    dense: Dense = None
    kv_cache_dtype: KvCacheDtype = "auto"
    experts: Experts = "exact"
    activations: Activations = None
    draft: Draft = "none"
    device: Device = "auto"
    devices: Devices = 1
    threads: Threads = DEFAULT_THREADS
    seed: Seed = 0
