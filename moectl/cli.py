"""The command line: each command parses its options, calls one function of `moectl.commands` and shows the result.

Everything heavy is imported inside the commands, so that `moectl --help` stays fast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moectl.errors import exit_code_of
from moectl.options import (
    DEFAULT_STORE,
    DEFAULT_THREADS,
    AvgBits,
    Axis,
    Budget,
    Data,
    Device,
    Experts,
    Json,
    Link,
    Model,
    Preset,
    ReconfigureEvery,
    RunId,
    Scope,
    Seed,
    StorePath,
    Threads,
    Window,
    hot_residency,
)

app = typer.Typer(
    name="moectl",
    help="Run a Mixture-of-Experts model that is larger than the memory of the GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (by default that of the command line) and return its exit code."""
    return exit_code_of(lambda: app(args=arguments, prog_name="moectl"))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from artifacts.provenance import versions

        print("moectl", versions().get("moectl", "(not installed)"))
        raise typer.Exit


@app.callback()
def _moectl(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


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
    from profilers.maps import Plan
    from profilers.routing import Batching
    from runtime.session import Settings

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
    from profilers.predictors import Plan
    from profilers.routing import Batching
    from runtime.session import Settings

    batching = Batching(batch=batch, length=length, prefill=0)
    request = verb.Request(Plan(distance, features), data, tokens, batching, seed=seed)
    settings = Settings(budget=budget, link=link, device=device, threads=threads)
    verb.show(verb.build(model, settings, request, store=store), as_json=json)


@app.command("inspect")
def _inspect(
    name: Annotated[
        str,
        typer.Argument(
            help="store, runs, activations, coactivation, entropy, similarity, buddies, quant-loss, replicas, curves, "
            "splits, maps, predictors, presets, policies, machines, substitution, precision or prefetch."
        ),
    ] = "store",
    model: Model = None,
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    layer: Annotated[int | None, typer.Option(min=0, help="One layer in detail.")] = None,
    heatmap: Annotated[bool, typer.Option("--heatmap", help="A picture instead of a table.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write that picture to this file, .png or .svg.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read replica files and check every byte.")] = False,
    data: Annotated[str, typer.Option(help="Held-out text, for substitution and precision.")] = "builtin:held-out",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of it.")] = 4096,
    draws: Annotated[int, typer.Option(min=1, help="Random draws: of resident experts, of widths.")] = 3,
    shares: Annotated[str, typer.Option(help="Shares of resident experts, for substitution.")] = "0.75,0.5,0.375",
    trace: Annotated[Path | None, typer.Option(help="For prefetch: a Parquet trace; else the store's.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Experts of a layer, of that trace.")] = None,
    distance: Annotated[int, typer.Option(min=1, help="For prefetch: up to so many layers ahead.")] = 3,
    budget: Budget = "25%",
    eviction: Annotated[str, typer.Option(help="For prefetch: what is evicted meanwhile.")] = "least_stale",
    window: Window = None,
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Show what a store holds, or what moectl knows, as a table or as a heatmap; or price substitution or few bits."""
    if png is not None:
        from moectl.commands.inspect import refuse_picture
        from moectl.pictures import check_picture

        refuse_picture(name)
        check_picture(png)
    if name == "substitution":
        from moectl.commands import substitution as pricing

        pricing.refuse_views(heatmap=heatmap, layer=layer)
        request = pricing.Request(data, tokens, draws, pricing.parse_shares(shares), seed)
        priced = pricing.substitution(model, request, store=store, run=run, device=device, threads=threads)
        pricing.show(priced, as_json=json)
        return
    if name == "precision":
        from moectl.commands import precision as bits

        bits.refuse_views(heatmap=heatmap, layer=layer, run=run)
        asked = bits.Request(data, tokens, draws, seed)
        bits.show(bits.precision(model, asked, store=store, device=device, threads=threads), as_json=json)
        return
    if name == "prefetch":
        from moectl.commands import prefetching
        from moectl.tracesource import Source

        prefetching.refuse_views(heatmap=heatmap, layer=layer, model=model)
        source = Source(trace, run, num_experts=num_experts, store=store)
        wanted = prefetching.Request(distance=distance, budget=budget, eviction=eviction, window=window)
        prefetching.show(prefetching.prefetching(source, wanted), as_json=json)
        return
    from moectl.commands import inspect as verb

    verb.refuse_model(name, model)
    view = verb.inspect(name, store, run=run, layer=layer, verify=verify)
    if png is not None:
        verb.picture(view, png)
        return
    verb.show(view, heatmap=heatmap, as_json=json)


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

        machine.refuse_routing(trace=trace, shard=shard)
        found = machine.profile_hardware(model, link=link, device=device, threads=threads, store=store)
        machine.show(found, as_json=json)
        return
    from moectl.commands import profile as verb
    from profilers.routing import Batching
    from runtime.session import Settings

    index, count = verb.parse_shard(shard)
    batching = Batching(batch=batch, length=length, prefill=prefill, index=index, count=count)
    samples = samples if similarity else 0
    request = verb.Request(data, tokens, batching, seed=seed, trace=trace, distance=distance, samples=samples)
    settings = Settings(budget=budget, link=link, device=device, threads=threads)
    verb.show(verb.profile(model, settings, request, store=store), as_json=json)


@app.command("doctor")
def _doctor(
    model: Model = None,
    budget: Budget = "25%",
    link: Link = "auto",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Say what this machine takes for a model and what stands in the way, and check a prediction on a short run."""
    from moectl.commands import doctor as verb

    verb.show(verb.doctor(model, budget=budget, link=link, device=device, threads=threads, store=store), as_json=json)


@app.command("merge")
def _merge(
    shards: Annotated[list[Path], typer.Argument(help="Stores that hold the shards of one profile.")],
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Merge the shards of a profile into one; in any order the numbers are the same."""
    from moectl.commands import profile as verb

    verb.show(verb.merge(shards, store=store), as_json=json)


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
    device: Device = "auto",
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Make replicas of every expert at a few bits, and measure what each costs. Stopped, the same command goes on."""
    from moectl.commands import quantize as verb
    from profilers.method import Method

    method = Method(verb.parse_bits(bits), group_size, damp, recipe, min_samples)
    jobs = jobs or verb.default_jobs()
    request = verb.Request(method, data, samples, length=length, seed=seed, jobs=jobs, device=device)
    verb.show(verb.quantize(model, request, store=store), as_json=json)


@app.command("export")
def _export(
    model: Model = None,
    what: Annotated[
        str,
        typer.Option(
            help="gptq (a checkpoint: experts from their replicas, the rest as it is), buddies, splits, placement or "
            "profile (JSON), routing (CSV), override-tensor (an option of llama.cpp)."
        ),
    ] = "gptq",
    out: Annotated[Path | None, typer.Option(help="The file to write, else stdout; of gptq a new folder.")] = None,
    bits: Annotated[int, typer.Option(help="Of gptq: 2, 3 or 4.")] = 4,
    budget: Budget = "25%",
    store: StorePath = DEFAULT_STORE,
    run: RunId = None,
    json: Json = False,
) -> None:
    """Write what a store holds for other programs."""
    from moectl.commands import export as verb

    if what != verb.GPTQ:
        text = verb.export_text(model, what, out, budget=budget, store=store, run=run)
        verb.show_text(text, as_json=json)
        return
    verb.show(verb.export(model, out, bits=bits, store=store, run=run), as_json=json)


@app.command("run")
def _run(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="Answer turns from stdin until it ends.")] = False,
    preset: Preset = "on-demand",
    budget: Budget = "25%",
    scope: Scope = None,
    routing: Axis = None,
    prefetch: Axis = None,
    eviction: Axis = None,
    miss: Axis = None,
    residency: Axis = None,
    avg_bits: AvgBits = None,
    link: Link = "auto",
    near: Annotated[str | None, typer.Option(help="Emulate a near tier of this rate, as 40GB/s.")] = None,
    scaled_to: Annotated[
        str | None, typer.Option(help="Emulate link and near tier in the proportions of a named machine.")
    ] = None,
    window: Window = None,
    experts: Experts = "exact",
    reconfigure_every: ReconfigureEvery = None,
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most probable token.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from so many of the most probable tokens; 0 from all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Draw from the most probable tokens up to this probability.")] = 0.95,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repeating less probable.")] = 1.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the text.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the routing trace to this Parquet file.")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Add what it sees to the store's expert maps (fmoe).")] = False,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Generate text with most experts outside the fast tier, and say what that took."""
    from moectl.commands import run as verb

    residency = hot_residency(residency, avg_bits)
    policies = {"routing": routing, "prefetch": prefetch, "eviction": eviction, "miss": miss, "residency": residency}
    settings = verb.Settings(
        preset=verb.find_presets([preset], store).get(preset, preset),
        policies={axis: text for axis, text in policies.items() if text is not None},
        budget=budget,
        scope=scope,
        link=link,
        near=near,
        scaled_to=scaled_to,
        window=window,
        experts=experts,
        device=device,
        threads=threads,
        reconfigure_every=reconfigure_every,
        learn=learn,
    )
    sampling = verb.Sampling(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    verb.run_command(model, prompt, settings, sampling, is_chat=is_chat, trace=trace, store=store, as_json=json)


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
        typer.Option(help="Whose bandwidths; `moectl inspect machines` lists them; here: as profiled."),
    ] = "a100-pcie4",
    preset: Preset = "on-demand",
    routing: Axis = None,
    prefetch: Axis = None,
    eviction: Axis = None,
    miss: Axis = None,
    residency: Axis = None,
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
    window: Window = None,
    reconfigure_every: ReconfigureEvery = None,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Replay a trace through the policies on virtual time, beside loading on demand and the oracle."""
    from moectl.commands import reproduce as papers
    from moectl.commands import simulate as verb
    from moectl.tracesource import Source

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
        reconfigure_every=reconfigure_every,
        stored=verb.find_presets([preset, *verb.names_in(compare or "")], store),
    )
    source = Source(trace, run, synthetic, num_experts=num_experts, model=model, store=store)
    verb.show(verb.simulate(source, request), as_json=json)


@app.command("bench")
def _bench(
    model: Model = None,
    presets: Annotated[
        str, typer.Option(help="Presets, a,b,c, or all; full, uniform-bits, on-demand and near always stand beside.")
    ] = "on-demand,near,shadow",
    budgets: Annotated[str, typer.Option(help="Budgets, each like --budget elsewhere.")] = "12.5%,25%,50%",
    links: Annotated[
        str, typer.Option(help="Links, each like --link elsewhere; with --simulate auto (the machine's) or rates.")
    ] = "auto",
    scaled_to: Annotated[
        str | None, typer.Option(help="Emulate link and near tier in the proportions of a named machine.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="On a trace and virtual time: the oracle too, no quality.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A Parquet trace; else the store's newest, or one recorded first.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="Whose bandwidths to simulate (a100-pcie4), or here: as profiled.")
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
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Measure presets beside each other, speed next to quality. Stopped half-way, the same command goes on."""
    from moectl.commands import bench as verb

    request = verb.Request(
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
    )
    benched = verb.bench(
        model, request, store=store, device=device, threads=threads, results=results or (), page=report
    )
    verb.show(benched, as_json=json)


@app.command("tune")
def _tune(
    model: Model = None,
    budget: Budget = "25%",
    scaled_to: Annotated[
        str | None, typer.Option(help="Emulate link and near tier in the proportions of a named machine.")
    ] = None,
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
    experts: Experts = "exact",
    name: Annotated[str, typer.Option(help="The preset that the pick becomes.")] = "tuned",
    device: Device = "auto",
    threads: Threads = DEFAULT_THREADS,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Find the fastest policies for a model, a budget and a machine: lossless, and within a loss that is allowed."""
    from moectl import tuneviews
    from moectl.commands import tune as verb
    from moectl.tunerequest import share

    request = verb.Request(
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
        experts=experts,
        name=name,
        seed=seed,
    )
    tuneviews.show(verb.tune(model, request, store=store, device=device, threads=threads), as_json=json)


@app.command("plan")
def _plan(
    model: Annotated[str, typer.Argument(help="A name as qwen3-30b-a3b, a folder with a config.json, or bundled.")],
    vram: Annotated[str, typer.Option(help="Memory of the GPU, as 24GB.")] = ...,
    machine: Annotated[
        str, typer.Option(help="Whose bandwidths; `moectl inspect machines` lists them.")
    ] = "rtx3090-pcie4",
    context: Annotated[int, typer.Option(help="Tokens that the attention cache holds.")] = 4096,
    json: Json = False,
) -> None:
    """Say what fits into a GPU and what to expect of each preset, from a model's config alone."""
    from moectl.commands import plan as verb

    verb.show(verb.plan(model, vram=vram, machine=machine, context=context), as_json=json)


@app.command("report")
def _report(
    out: Annotated[Path, typer.Argument(help="The page to write, as report.html.")],
    store: StorePath = DEFAULT_STORE,
    run: Annotated[int | None, typer.Option("--run", min=1, help="A run: of its model, led by its bench.")] = None,
    json: Json = False,
) -> None:
    """Write what a store knows of a model as one HTML page: words, charts, tables, and the query of each."""
    from moectl.commands import report as verb

    verb.show(verb.report(out, store=store, run=run), as_json=json)


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
    from moectl.tracesource import Source

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
    from moectl.tracesource import Source

    source = Source(like, run, num_experts=num_experts, model=model, store=store)
    verb.show(verb.fit_trace(source, hits or [], seed=seed), as_json=json)


@app.command("demo")
def _demo(
    budget: Budget = "25%",
    scaled_to: Annotated[str, typer.Option(help="The machine whose proportions are emulated.")] = "rtx3090-pcie4",
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens to profile.")] = 16_384,
    threads: Threads = DEFAULT_THREADS,
    store: Annotated[Path | None, typer.Option(help="Keep the artefacts in this store.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the table to this SVG or PNG (extra: report).")] = None,
    json: Json = False,
) -> None:
    """The whole road on the bundled model, no network: profile, buddies, four presets, one table."""
    from moectl.commands import demo as verb
    from moectl.pictures import check_picture, draw_demo

    if picture:
        check_picture(picture)
    shown = verb.demo(budget=budget, scaled_to=scaled_to, tokens=tokens, store=store, threads=threads)
    verb.show(shown, as_json=json)
    if picture:
        draw_demo(shown, picture)
