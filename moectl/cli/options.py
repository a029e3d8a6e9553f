"""Options that several commands share: they look and mean the same in each of them."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import OptionInfo

from artifacts.errors import BadUsage, OutOfResources
from moectl import bundled
from moectl.cli import completion
from moectl.cli.groups import fill
from moectl.shared.defaults import FREE
from moectl.shared.names import names_in
from runtime.model.files.locate import check_name

if TYPE_CHECKING:
    from runtime.session.generation.sampling import Sampling
    from runtime.session.settings import Settings


def or_bundled(context: typer.Context, name: str | None) -> str | None:
    """Return the model's name, None for the bundled one; say so when the store suggests that
    another was meant.

    Raises BadInput for a name that can be no model's.

    `--store` is read before the model, for it is eager.
    """
    if (
        name is None
        and not context.resilient_parsing
        and (hint := bundled.also_held(context.params["store"]))
    ):
        typer.echo(f"moectl: {hint}: name it after `{context.info_name}` to mean it", err=True)
    named = bundled.as_named(name)
    if named is not None and not context.resilient_parsing:
        check_name(named)  # before the imports of the command, which take seconds
    return named


def known_machine(context: typer.Context, name: str | None) -> str | None:
    """Refuse an unknown machine before the imports of the command, which take seconds. Raises
    BadUsage."""
    if name is not None and not context.resilient_parsing:
        from artifacts.hardware.machines import HERE, machine

        known, _, _ = name.partition(":")  # times may follow, which the command reads
        if known != HERE:
            machine(known)
    return name


def known_presets(context: typer.Context, names: str) -> str:
    """Refuse a list of presets with an unknown name before the imports of the command. Raises
    BadUsage."""
    if names.strip() != "all" and not context.resilient_parsing:
        from runtime.policies.presets import preset, presets
        from runtime.session.presets import find_presets

        others = {*names_in(names)} - {*presets(), ""}
        for name in sorted(others - {*find_presets(others, context.params["store"])}):
            preset(name)
    return names


StorePath = Annotated[
    Path,
    typer.Option(
        "--store",
        envvar="MOECTL_STORE",
        is_eager=True,
        show_default="moe.duckdb here, or in XDG's data folder",
        help="The store, one DuckDB file.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text and tables.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print counters by layer and the receipt too.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Clients = Annotated[
    int | None,
    typer.Option(
        "--clients", help="Requests in progress at a time, each client's next after its last."
    ),
]
RunId = Annotated[
    int | None,
    typer.Option("--run", min=1, help="A run of the store; the newest that fits by default."),
]

OfTrace = Annotated[
    int | None,
    typer.Option("--run", min=1, help="A run of the store that kept its trace; else the newest."),
]
NumExperts = Annotated[int | None, typer.Option(help="Experts of a layer.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Check replica files by their hashes first.")
]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
HalvedLength = Annotated[
    int, typer.Option(min=2, help="Tokens of a sequence; half are prompt, half are decoded.")
]
Sequences = Annotated[
    int, typer.Option(min=1, help="Sequences at a time; an expert is loaded once for all.")
]

Model = Annotated[
    str | None,
    typer.Argument(
        callback=or_bundled,
        help="A folder, a GGUF file, a hub id as owner/name:Q4_K_M, or a name as gpt-oss-20b; else "
        "the bundled one. Also as -m MODEL.",
        autocompletion=completion.models,
    ),
]
AnyModel = Annotated[
    str | None,
    typer.Argument(help="A checkpoint, by any of its names; else whichever fits."),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="SIZE",
        help="The fast tier: 25%, 96x (experts), 2GiB.",
        autocompletion=completion.words(completion.BUDGETS),
    ),
]
Link = Annotated[
    str,
    typer.Option(
        "--link",
        help="disk, direct (no page cache), cuda, 5GB/s+10us.",
        autocompletion=completion.words(completion.LINKS),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", help="auto, cpu or cuda.", autocompletion=completion.words(completion.DEVICES)
    ),
]
Devices = Annotated[
    int,
    typer.Option("--devices", min=1, help="GPUs to spread experts over, or parts of one device."),
]
# Waiting threads spin: with no core left for the link, a run takes tens of times longer.
DEFAULT_THREADS = max(1, (os.cpu_count() or 2) - 1)
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=1,
        show_default="all cores but one",
        help="CPU threads; leave one core to the link.",
    ),
]
Experts = Annotated[
    str,
    typer.Option(
        help="exact, or fused: compiled, the same within rounding; auto: fused where it can be.",
        autocompletion=completion.words(("auto", "exact", "fused")),
    ),
]
Decide = Annotated[
    str,
    typer.Option(
        help="host, or device: the GPU itself evicts; auto: the device where it can.",
        autocompletion=completion.words(("auto", "host", "device")),
    ),
]
Base = Annotated[
    int,
    typer.Option("--base", help="Bits of all experts: 16 as published; 8, 4, 3, 2."),
]
Dense = Annotated[
    int | None,
    typer.Option("--dense", help="Bits of other layers, 8 or 4; else as published."),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="auto: keys and values as computed; int8, int4: less memory, at a loss.",
        autocompletion=completion.words(("auto", "int8", "int4")),
    ),
]
Activations = Annotated[
    int | None,
    typer.Option(
        "--activations",
        help="8: a CPU rounds tokens for q8_0, q4_0 and their kind, at a loss; else as computed.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="NAME[:k]",
        help="Draft k tokens a pass, which loses nothing: ngram, resident, mtp, model=PATH; auto.",
        autocompletion=completion.words(("none", "auto", "ngram", "resident", "mtp")),
    ),
]
AvgBits = Annotated[
    float | None,
    typer.Option(help="Bits of cold experts: 1 to 4, or 16."),
]
Executor = Annotated[
    str,
    typer.Option(
        "--executor",
        help="Where jobs run: local, ray (a cluster begun here), ray:auto, ray:HOST:PORT.",
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="Text: a file or folder, hf:name[:config[:split]], builtin or builtin:held-out."
    ),
]
_AUTO = "auto: the best lossless. See: inspect presets."
Preset = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="See `moectl inspect presets`.",
        autocompletion=completion.presets,
    ),
]
Scope = Annotated[
    str | None,
    typer.Option(
        metavar="SCOPE",
        help="layer or global: where an expert takes its slot.",
        autocompletion=completion.words(("layer", "global")),
    ),
]
ScaledTo = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Emulate link and near tier in the proportions of a machine.",
        callback=known_machine,
        autocompletion=completion.machines,
    ),
]
Window = Annotated[
    str | None, typer.Option(metavar="SIZE", help="To prefetch per layer, as 64MiB; else measured.")
]
ReconfigureEvery = Annotated[
    int | None,
    typer.Option(
        help="Tokens until a solved split is solved anew; 0: never.",
        show_default="5000",
    ),
]


def _replacing(axis: str) -> OptionInfo:
    """The option that replaces the preset's policy of one axis."""
    return typer.Option(
        metavar="POLICY",
        help="name or name:field=value,...",
        autocompletion=completion.policies(axis),
    )


Routing = Annotated[str | None, _replacing("routing")]
Prefetch = Annotated[str | None, _replacing("prefetch")]
Eviction = Annotated[str | None, _replacing("eviction")]
Miss = Annotated[str | None, _replacing("miss")]
Residency = Annotated[str | None, _replacing("residency")]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine for a command that observes the model it runs."""

    budget: Budget = "25%"
    link: Link = "auto"
    device: Device = "auto"
    threads: Threads = DEFAULT_THREADS

    def settings(self) -> "Settings":
        """Return the settings of a run with these options, on the default preset."""
        from runtime.session.settings import Settings

        return fill(Settings, self)


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """A preset, and the fast tier that it gets."""

    preset: Annotated[
        str, typer.Option(metavar="NAME", help=_AUTO, autocompletion=completion.presets_or_auto)
    ] = "auto"
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="The fast tier: 25%, 96x (experts), 2GiB; auto: what is free.",
            autocompletion=completion.words((FREE, *completion.BUDGETS)),
        ),
    ] = FREE
    scope: Scope = None

    def settings(
        self, store: Path, *groups: object, model: str | None, base: int, **others: object
    ) -> "Settings":
        """Return the settings of a run, with the preset that the store holds under this name if
        there is one.

        Imports no torch, so that a wrong name or budget is refused at once, and so is a preset
        whose requirements the store does not meet.
        """
        from moectl.shared.preset_choice import AUTO
        from runtime.control.sizes import check_budget
        from runtime.policies import build
        from runtime.session.presets import check_stored, find_presets
        from runtime.session.settings import Settings

        if self.budget != FREE:
            check_budget(self.budget)
        preset = {AUTO.name: AUTO}
        try:
            preset |= find_presets([self.preset], store)
        except (
            OutOfResources
        ):  # held by another process, of which the choice of a preset makes a note
            if self.preset != AUTO.name:
                raise
        settings = fill(
            Settings, self, *groups, preset=preset.get(self.preset, self.preset), **others
        )
        name = model or str(bundled.demo_model())
        check_stored(build(settings.texts()), store, name=name, base=base, learns=settings.learn)
        return settings


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Policies that replace the preset's own, one option for each axis."""

    routing: Routing = None
    prefetch: Prefetch = None
    eviction: Eviction = None
    miss: Miss = None
    residency: Residency = None

    def given(self, avg_bits: float | None = None) -> dict[str, str]:
        """Return the policies that the user named, by axis; `--avg-bits` stands for a residency
        policy.

        Raises BadUsage when both `--avg-bits` and `--residency` are given.
        """
        policies = {axis.name: getattr(self, axis.name) for axis in fields(self)}
        if avg_bits is not None:
            if self.residency is not None:
                raise BadUsage(
                    "--avg-bits is short for --residency hot:avg_bits=N: give one of them"
                )
            policies["residency"] = f"hot:avg_bits={avg_bits:g}"
        return {axis: text for axis, text in policies.items() if text is not None}


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
    kv_cache_dtype: KvCacheDtype = "auto"
    experts: Experts = "auto"
    activations: Activations = None
    draft: Draft = "none"
    decide: Decide = "auto"
    reconfigure_every: ReconfigureEvery = None
    device: Device = "auto"
    devices: Devices = 1
    threads: Threads = DEFAULT_THREADS


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of the sampler: the choice of the next token, and the end of the text."""

    max_new_tokens: Annotated[
        int, typer.Option("-n", "--max-new-tokens", min=1, help="Tokens to generate.")
    ] = 128
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

    def sampling(self) -> "Sampling":
        """Return the sampling with these options."""
        from runtime.session.generation.sampling import Sampling

        return fill(Sampling, self, temperature=0.0 if self.greedy else self.temperature)
