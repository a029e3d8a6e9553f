"""Commands that say what to expect and what to run: `simulate`, `bench`, `tune`, `plan`."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli import completion
from moectl.cli.app import app
from moectl.cli.options import (
    DEFAULT_THREADS,
    AvgBits,
    Base,
    Budget,
    Data,
    Device,
    Devices,
    Eviction,
    Executor,
    Experts,
    Json,
    Link,
    Miss,
    Model,
    Prefetch,
    Preset,
    ReconfigureEvery,
    Residency,
    Routing,
    ScaledTo,
    Scope,
    Seed,
    StorePath,
    Threads,
    Window,
    hot_residency,
)
from moectl.shared.defaults import DEFAULT_STORE


@app.command("simulate")
def _simulate(
    trace: Annotated[Path | None, typer.Option(help="A Parquet trace, as `moectl run --trace` writes it.")] = None,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="A run of the store that kept its trace; else the newest.")
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option(help="Make a trace: skew=0.8,locality=0.4,similarity=0.9,predictability=0.7,...")
    ] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose shape: a name as mixtral-8x7b, a folder with a config.json, or bundled.")
    ] = None,
    machine: Annotated[
        str,
        typer.Option(
            help="Whose bandwidths; `moectl inspect machines` lists them; here: as profiled.",
            autocompletion=completion.machines,
        ),
    ] = "a100-pcie4",
    preset: Preset = "on-demand",
    routing: Routing = None,
    prefetch: Prefetch = None,
    eviction: Eviction = None,
    miss: Miss = None,
    residency: Residency = None,
    avg_bits: AvgBits = None,
    compare: Annotated[
        str | None, typer.Option(help="Several instead of one: names of presets or eviction policies, a,b,c.")
    ] = None,
    reproduce: Annotated[
        str | None,
        typer.Option(help="A paper's figures: moepic-table1, moepic, specmd, buddymoe, context-aware or fmoe."),
    ] = None,
    budget: Budget = "25%",
    scope: Scope = None,
    devices: Devices = 1,
    window: Window = None,
    reconfigure_every: ReconfigureEvery = None,
    base: Base = 16,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Replay a trace through the policies on virtual time, beside loading on demand and the oracle."""
    from moectl.commands import reproduce as papers
    from moectl.commands import simulate as verb
    from moectl.shared.trace_source import Source

    if reproduce is not None:
        is_other = any(given is not None for given in (run, synthetic, num_experts, model, compare))
        papers.show(papers.reproduce(reproduce, trace=trace, other_options=is_other), as_json=json)
        return
    residency = hot_residency(residency, avg_bits)
    policies = {"routing": routing, "prefetch": prefetch, "eviction": eviction, "miss": miss, "residency": residency}
    request = verb.Request(
        preset=preset,
        policies={axis: text for axis, text in policies.items() if text is not None},
        scope=scope,
        budget=budget,
        window=window,
        machine=machine,
        compare=compare,
        devices=devices,
        reconfigure_every=reconfigure_every,
        base=base,
        stored=verb.find_presets([preset, *verb.names_in(compare or "")], store),
    )
    source = Source(trace, run, synthetic, num_experts=num_experts, model=model, store=store)
    verb.show(verb.simulate(source, request), as_json=json)


@app.command("bench")
def _bench(
    model: Model = None,
    presets: Annotated[
        str,
        typer.Option(
            help="Presets, a,b,c, or all; full, uniform-bits, on-demand and near always stand beside.",
            autocompletion=completion.listed(completion.presets),
        ),
    ] = "on-demand,near,shadow",
    budgets: Annotated[str, typer.Option(help="Budgets, each like --budget elsewhere.")] = "12.5%,25%,50%",
    links: Annotated[
        str, typer.Option(help="Links, each like --link elsewhere; with --simulate auto (the machine's) or rates.")
    ] = "auto",
    scaled_to: ScaledTo = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="On a trace and virtual time: the oracle too, no quality.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A Parquet trace; else the store's newest, or one recorded first.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Whose bandwidths to simulate (a100-pcie4), or here: as profiled.",
            autocompletion=completion.machines,
        ),
    ] = None,
    data: Data = "builtin:held-out",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of it that each setting reads in a round.")] = 768,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence; half are prompt, half are decoded.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each setting is measured.")] = 3,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what an earlier run has finished.")] = False,
    results: Annotated[
        list[Path] | None,
        typer.Option("--import", help="Show what another tool measured too: llama-bench -o json, vllm bench serve."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write it all as one HTML page, with charts.")] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Other programs beside them: transformers-eager, -batched, -grouped, accelerate-disk, -cpu, or all."
        ),
    ] = "",
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks of lm-evaluation-harness too: word_problems, a YAML file, a folder of them, lm-eval:NAME."
        ),
    ] = "",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="With --simulate: settings at a time, each in a process of its own.")
    ] = None,
    executor: Executor = "local",
    base: Base = 16,
    experts: Experts = "exact",
    device: Device = "auto",
    devices: Devices = 1,
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Measure presets beside each other, speed next to quality. Stopped half-way, the same command goes on."""
    from moectl.commands import bench as verb

    request = verb.BenchRequest(
        stored=verb.stored_among(presets, store),
        presets=presets,
        budgets=budgets,
        links=links,
        scaled_to=scaled_to,
        simulate=simulate,
        trace=trace,
        machine=machine,
        data=data,
        tokens=tokens,
        length=length,
        rounds=rounds,
        seed=seed,
        again=again,
        peers=peers,
        tasks=tasks,
        jobs=jobs,
        executor=executor,
        base=base,
        experts=experts,
        devices=devices,
    )
    benched = verb.bench(
        model, request, store=store, device=device, threads=threads, results=results or (), page=report
    )
    verb.show(benched, as_json=json)


@app.command("tune")
def _tune(
    model: Model = None,
    budget: Budget = "25%",
    scaled_to: ScaledTo = None,
    link: Link = "auto",
    max_loss: Annotated[str, typer.Option(help="Of perplexity, at most: 0.5%, or 0 for lossless alone.")] = "0.5%",
    minutes: Annotated[float, typer.Option(help="How long to search and verify, about.")] = 3.0,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Combinations to try of each kind, whatever time that takes.")
    ] = None,
    data: Annotated[str, typer.Option(help="Text to record a trace on, if the store has none.")] = "builtin",
    held_out: Annotated[str, typer.Option(help="Text to verify on.")] = "builtin:held-out",
    check_data: Annotated[
        str | None, typer.Option(help="Text of another kind, to see what the picks are worth there.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to verify on.")] = 2048,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence; half are prompt, half are decoded.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each is measured live.")] = 5,
    base: Base = 16,
    experts: Experts = "exact",
    name: Annotated[str, typer.Option(help="The preset that the pick becomes.")] = "tuned",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Candidates replayed at a time, each in a process of its own.")
    ] = None,
    executor: Executor = "local",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Find the fastest policies for a model, a budget and a machine: lossless, and within a loss that is allowed."""
    from moectl.commands import tune as verb
    from moectl.tune import table as tuneviews
    from moectl.tune.request import share

    request = verb.TuneRequest(
        budget=budget,
        scaled_to=scaled_to,
        link=link,
        max_loss=share(max_loss),
        minutes=minutes,
        candidates=candidates,
        data=data,
        held_out=held_out,
        check_data=check_data,
        tokens=tokens,
        length=length,
        rounds=rounds,
        base=base,
        experts=experts,
        name=name,
        jobs=jobs,
        executor=executor,
        seed=seed,
    )
    tuneviews.show(verb.tune(model, request, store=store, device=device, threads=threads), as_json=json)


@app.command("plan")
def _plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A name as qwen3-30b-a3b, a folder with a config.json, or bundled.", autocompletion=completion.models
        ),
    ],
    vram: Annotated[str, typer.Option(help="Memory of the GPU, as 24GB.")] = ...,
    machine: Annotated[
        str,
        typer.Option(
            help="Whose bandwidths; `moectl inspect machines` lists them.", autocompletion=completion.machines
        ),
    ] = "rtx3090-pcie4",
    context: Annotated[int, typer.Option(help="Tokens that the attention cache holds.")] = 4096,
    json: Json = False,
) -> None:
    """Say what fits into a GPU and what to expect of each preset, from a model's config alone."""
    from moectl.commands import plan as verb

    verb.show(verb.plan(model, vram=vram, machine=machine, context=context), as_json=json)
