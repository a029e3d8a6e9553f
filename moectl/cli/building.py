"""Commands that observe a model and build artefacts from it: profiles, buddies, maps, predictors, replicas, splits."""

from pathlib import Path
from typing import Annotated

import typer

from moectl.cli.app import app
from moectl.cli.options import (
    DEFAULT_THREADS,
    Budget,
    Data,
    Device,
    Executor,
    Json,
    Link,
    Model,
    RunId,
    Seed,
    StorePath,
    Threads,
)
from moectl.shared.defaults import DEFAULT_STORE


@app.command("profile")
def _profile(
    model: Model = None,
    data: Data = "builtin",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to profile.")] = 65_536,
    trace: Annotated[bool, typer.Option("--trace", help="Keep the whole trace, for replays.")] = False,
    distance: Annotated[int, typer.Option(min=1, help="Layers ahead of which the trace keeps what was foreseen.")] = 1,
    hardware: Annotated[
        bool, typer.Option("--hardware", help="Measure the machine instead: seconds of parts, loads, near memory.")
    ] = False,
    similarity: Annotated[
        bool,
        typer.Option("--similarity/--no-similarity", help="Measure what experts are worth in each other's place."),
    ] = True,
    samples: Annotated[int, typer.Option(min=1, help="Tokens on which that is measured.")] = 512,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    prefill: Annotated[int, typer.Option(min=0, help="Of them the prompt; the rest counts as decode.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time; an expert is loaded once for all.")] = 16,
    shard: Annotated[str, typer.Option(help="i/N: only this share of the batches; `moectl merge` joins them.")] = "1/1",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that count, each on one thread and with the budget; else this one alone."),
    ] = None,
    executor: Executor = "local",
    budget: Budget = "25%",
    link: Link = "auto",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Profile what a model's routers do over text, or the machine. Stopped half-way, the same command goes on."""
    if hardware:
        from moectl.commands import hardware as machine

        machine.refuse_routing(trace=trace, shard=shard, is_spread=jobs is not None or executor != "local")
        found = machine.profile_hardware(model, link=link, device=device, threads=threads, store=store)
        machine.show(found, as_json=json)
        return
    from moectl.commands import profile as verb
    from profilers.text.batches import Batching
    from runtime.session.session import Settings

    index, count = verb.parse_shard(shard)
    batching = Batching(batch=batch, length=length, prefill=prefill, index=index, count=count)
    samples = samples if similarity else 0
    request = verb.Request(
        data,
        tokens,
        batching,
        seed=seed,
        trace=trace,
        distance=distance,
        samples=samples,
        jobs=jobs,
        executor=executor,
    )
    settings = Settings(budget=budget, link=link, device=device, threads=threads)
    verb.show(verb.profile(model, settings, request, store=store), as_json=json)


@app.command("merge")
def _merge(
    shards: Annotated[list[Path], typer.Argument(help="Stores that hold the shards of one profile.")],
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Merge the shards of a profile into one; in any order the numbers are the same."""
    from moectl.commands import profile as verb

    verb.show(verb.merge(shards, store=store), as_json=json)


@app.command("build-buddies")
def _build_buddies(
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    alpha: Annotated[
        str,
        typer.Option(help="Share of the metric that a list covers: one number, one per layer, or LAYER:NUMBER,..."),
    ] = "0.95",
    k_max: Annotated[int, typer.Option(min=1, help="Longest list.")] = 16,
    metric: Annotated[
        str, typer.Option(help="What ranks buddies: loss or output (both measured), coactivation or weighted.")
    ] = "loss",
    json: Json = False,
) -> None:
    """Build buddy lists from a profile: for each expert, the peers that may stand in for it."""
    from moectl.commands import build_buddies as verb

    verb.show(verb.build_buddies(store, run=run, alpha=alpha, k_max=k_max, metric=metric), as_json=json)


@app.command("build-maps")
def _build_maps(
    model: Model = None,
    capacity: Annotated[int, typer.Option(min=1, help="Maps to keep: later ones replace those most like them.")] = 1000,
    distance: Annotated[int, typer.Option(min=1, help="Layers ahead that a match is to guide.")] = 3,
    data: Data = "builtin",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of all requests together, at most.")] = 16_384,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests, at most.")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a request, at most.")] = 128,
    prefill: Annotated[int, typer.Option(min=0, help="Of them the prompt: one map; each further token has one.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time; an expert is loaded once for all.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, or float16: half the memory, slower to match.")] = "float32",
    budget: Budget = "25%",
    link: Link = "auto",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Keep maps of what routers say, iteration by iteration, to prefetch by when something like it comes (fMoE)."""
    from moectl.commands import build_maps as verb
    from profilers.routing.maps import Plan
    from profilers.text.batches import Batching
    from runtime.session.session import Settings

    batching = Batching(batch=batch, length=length, prefill=prefill)
    request = verb.Request(Plan(capacity, distance, dtype), data, tokens, batching, requests=requests, seed=seed)
    settings = Settings(budget=budget, link=link, device=device, threads=threads)
    verb.show(verb.build(model, settings, request, store=store), as_json=json)


@app.command("build-predictor")
def _build_predictor(
    model: Model = None,
    distance: Annotated[int, typer.Option(min=1, help="Layers ahead to predict: each of 1 to this.")] = 3,
    features: Annotated[int, typer.Option(min=0, help="Random features beside a router's input; 0: linear.")] = 512,
    data: Data = "builtin",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens; three tenths of them choose and test.")] = 32_768,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time; an expert is loaded once for all.")] = 16,
    budget: Budget = "25%",
    link: Link = "auto",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Learn from routers' inputs which experts the layers ahead will want, to prefetch by; tested on held-out text."""
    from moectl.commands import build_predictor as verb
    from profilers.routing.predictors import Plan
    from profilers.text.batches import Batching
    from runtime.session.session import Settings

    batching = Batching(batch=batch, length=length, prefill=0)
    request = verb.Request(Plan(distance, features), data, tokens, batching, seed=seed)
    settings = Settings(budget=budget, link=link, device=device, threads=threads)
    verb.show(verb.build(model, settings, request, store=store), as_json=json)


@app.command("quantize")
def _quantize(
    model: Model = None,
    bits: Annotated[str, typer.Option(help="Widths of the replicas.")] = "1,2,3,4",
    group_size: Annotated[
        int, typer.Option(min=1, help="Inputs that share a scale; 128, 64 and 32 give way where they do not divide.")
    ] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of text to calibrate on.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence, at most.")] = 512,
    recipe: Annotated[
        str, typer.Option(help="refined (as many bytes, smaller errors), or plain: GPTQ as published.")
    ] = "refined",
    damp: Annotated[float, typer.Option(help="Added to the Hessian's diagonal, as a share of its mean.")] = 0.01,
    min_samples: Annotated[
        int, typer.Option(min=0, help="Experts with fewer tokens of their own are judged on their layer's.")
    ] = 64,
    data: Data = "builtin",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Experts at a time, each in a process of one thread; else one a core."),
    ] = None,
    executor: Executor = "local",
    device: Device = "auto",
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Make replicas of every expert at a few bits, and measure what each costs. Stopped, the same command goes on."""
    from moectl.commands import quantize as verb
    from profilers.quantise.method import Method

    method = Method(verb.parse_bits(bits), group_size, damp, recipe, min_samples)
    request = verb.Request(method, data, samples, length=length, seed=seed, jobs=jobs, executor=executor, device=device)
    verb.show(verb.quantize(model, request, store=store), as_json=json)


@app.command("split")
def _split(
    trace: Annotated[
        Path | None, typer.Option(help="A Parquet trace with predictions, as `moectl run` writes it.")
    ] = None,
    run: Annotated[
        int | None, typer.Option("--run", min=1, help="A run of the store that kept its trace; else the newest.")
    ] = None,
    synthetic: Annotated[str | None, typer.Option(help="Make a trace: skew=0.8,locality=0.4,...")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose trace: a folder, bundled, or a name as mixtral-8x7b for its shape alone.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="Whose latencies: a named machine's, or here: the store's hardware profile.")
    ] = "here",
    link: Annotated[str | None, typer.Option(help="Which link of the hardware profile; else the one of a run.")] = None,
    budget: Budget = "25%",
    solver: Annotated[
        str,
        typer.Option(
            help="dynamic; greedy, as published; or replay: of both and of even cuts what runs the trace fastest."
        ),
    ] = "replay",
    zeta: Annotated[float, typer.Option(help="Share of an expert that is moved at a time.")] = 0.01,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Share a budget between layers and split their experts, so that compute waits least (MoEpic)."""
    from moectl.commands import split as verb
    from moectl.shared.trace_source import Source

    source = Source(trace, run, synthetic, num_experts=num_experts, model=model, store=store)
    request = verb.Request(budget=budget, machine=machine, link=link, solver=solver, zeta=zeta)
    verb.show(verb.split(source, request), as_json=json)


@app.command("fit-trace")
def _fit_trace(
    like: Annotated[Path | None, typer.Option(help="The Parquet trace to be like.")] = None,
    run: Annotated[int | None, typer.Option("--run", min=1, help="A run of the store that kept its trace.")] = None,
    hits: Annotated[
        list[str] | None, typer.Option(help="Hit rates to reach: lru:10=.23,20=.4 (experts held a layer); repeatable.")
    ] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer.")] = None,
    model: Annotated[str | None, typer.Option(help="Whose shape: a name as mixtral-8x7b, or a folder.")] = None,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Find the dials of a synthetic trace that is like a real one, or has given hit rates."""
    from moectl.commands import fit_trace as verb
    from moectl.shared.trace_source import Source

    source = Source(like, run, num_experts=num_experts, model=model, store=store)
    verb.show(verb.fit_trace(source, hits or [], seed=seed), as_json=json)


@app.command("pack")
def _pack(
    model: Annotated[str, typer.Argument(help="A checkpoint: a local folder or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write, which must not be there yet.")],
    json: Json = False,
) -> None:
    """Rewrite a checkpoint so that each expert is one read. Stopped half-way, the same command goes on."""
    from moectl.commands import pack as verb

    verb.show(verb.pack(model, out), as_json=json)
