"""Commands that run a model: `run`, `demo`, and `doctor`, which says what stands in the way."""

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
    Device,
    Devices,
    Eviction,
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


@app.command("run")
def _run(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    is_chat: Annotated[bool, typer.Option("--chat", help="Answer turns from stdin until it ends.")] = False,
    preset: Preset = "on-demand",
    budget: Budget = "25%",
    scope: Scope = None,
    routing: Routing = None,
    prefetch: Prefetch = None,
    eviction: Eviction = None,
    miss: Miss = None,
    residency: Residency = None,
    avg_bits: AvgBits = None,
    link: Link = "auto",
    near: Annotated[str | None, typer.Option(help="Emulate a near tier of this rate, as 40GB/s.")] = None,
    scaled_to: ScaledTo = None,
    window: Window = None,
    base: Base = 16,
    experts: Experts = "exact",
    reconfigure_every: ReconfigureEvery = None,
    device: Device = "auto",
    devices: Devices = 1,
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
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the store's replica files with their hashes first.")
    ] = False,
    seed: Seed = 0,
    store: StorePath = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Generate text with most experts outside the fast tier, and say what that took."""
    from moectl.commands import run as verb
    from runtime.session.presets import find_presets

    residency = hot_residency(residency, avg_bits)
    policies = {"routing": routing, "prefetch": prefetch, "eviction": eviction, "miss": miss, "residency": residency}
    settings = verb.Settings(
        preset=find_presets([preset], store).get(preset, preset),
        policies={axis: text for axis, text in policies.items() if text is not None},
        budget=budget,
        scope=scope,
        link=link,
        near=near,
        scaled_to=scaled_to,
        window=window,
        experts=experts,
        device=device,
        devices=devices,
        threads=threads,
        reconfigure_every=reconfigure_every,
        verify=verify,
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
    verb.run_command(
        model, prompt, settings, sampling, is_chat=is_chat, trace=trace, store=store, base=base, as_json=json
    )


@app.command("demo")
def _demo(
    budget: Budget = "25%",
    scaled_to: Annotated[
        str,
        typer.Option(help="The machine whose proportions are emulated.", autocompletion=completion.machines),
    ] = "rtx3090-pcie4",
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens to profile.")] = 16_384,
    threads: Threads = DEFAULT_THREADS,
    store: Annotated[Path | None, typer.Option(help="Keep the artefacts in this store.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the table to this SVG file.")] = None,
    json: Json = False,
) -> None:
    """The whole road on the bundled model, no network: profile, buddies, four presets, one table."""
    from moectl.commands import demo as verb
    from moectl.show.pictures import check_picture, draw_demo

    if picture:
        check_picture(picture)
    shown = verb.demo(budget=budget, scaled_to=scaled_to, tokens=tokens, store=store, threads=threads)
    verb.show(shown, as_json=json)
    if picture:
        draw_demo(shown, picture)


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
    from moectl.shared import installed

    installed.check()  # before what may be missing is imported
    from moectl.commands import doctor as verb

    verb.show(verb.doctor(model, budget=budget, link=link, device=device, threads=threads, store=store), as_json=json)
