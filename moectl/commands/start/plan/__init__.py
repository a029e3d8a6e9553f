"""`moectl plan`: from a config alone, without weights: what fits, what to expect, what to do
next."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from moectl.bundled import as_named, demo_model
from moectl.cli import completion, options
from moectl.shared.terminal.resuming import resumable

if TYPE_CHECKING:
    from artifacts.traces.clients import Clients
    from moectl.commands.start.plan.deployment import DeploymentPlan
    from moectl.commands.start.plan.fitting import PlanRequest
    from moectl.commands.start.plan.place import PlanPlace


@dataclass(frozen=True, slots=True)
class PlaceOptions:
    """The place that a plan is for."""

    machine: Annotated[
        str | None,
        typer.Option(
            help="Whose memory and bandwidths, as rtx4090 or m4-max; `moectl inspect machines` "
            "lists them; NAME:load=14ms,layer=1ms,head=1ms: by times.",
            show_default="this machine's GPU",
            autocompletion=completion.machines,
        ),
    ] = None
    vram: Annotated[
        str | None,
        typer.Option(help="Memory of the GPU, as 24GB.", show_default="all that the machine has"),
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(
            help="RAM beside it, as 32GB.",
            show_default="this machine's; 64GB with --machine or --vram",
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(
            help="Free disk, as 500GB.",
            show_default="this machine's; enough with --machine or --vram",
        ),
    ] = None

    def find(self) -> "PlanPlace":
        """Return that place. Raises BadUsage."""
        from moectl.commands.start.plan.place import PlanPlace

        return PlanPlace.find(self.vram, self.machine, ram=self.ram, disk=self.disk)


def plan(
    *,
    model: Annotated[
        str,
        typer.Argument(
            help="A name as qwen3-30b-a3b or owner/name:Q4_K_M, a folder, a file, or bundled.",
            autocompletion=completion.models,
        ),
    ],
    place: PlaceOptions,
    dense: options.Dense = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    context: Annotated[
        int,
        typer.Option("-c", "--context", help="Tokens of a request that the attention cache holds."),
    ] = 4096,
    clients: options.Clients = None,
    details: Annotated[
        bool, typer.Option("--details", help="Print tables, every assumption and further steps.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Replay every preset too, in half a minute.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Say whether a model fits, in which quants and how fast."""
    from moectl.commands.start.plan.answer import lines, plan_answer
    from moectl.commands.start.plan.fitting import PlanRequest

    named = as_named(model) or str(demo_model())
    request = PlanRequest(named, place.find(), context, dense, _clients(clients), kv_cache_dtype)
    if details or simulate or json:
        _show_deployment(request, simulate=simulate, json=json)
        return
    for line in lines(plan_answer(request)):
        print(line)


def _show_deployment(request: "PlanRequest", *, simulate: bool, json: bool) -> None:
    """Print the tables, or one JSON object."""
    from moectl.commands.start.plan import tables
    from moectl.commands.start.plan.answer import plan_answer
    from moectl.commands.start.plan.deployment import plan_deployment
    from moectl.show.render import show_json

    deployment = plan_deployment(request)
    if not json:
        tables.show(deployment)
    if simulate:
        deployment = _simulated(deployment)
    if json:
        show_json(tables.record(deployment, plan_answer(request)))
    else:
        tables.show_simulated(deployment)


def _clients(text: str | None) -> "Clients | None":
    """Import numpy only where clients are given."""
    if text is None:
        return None
    from artifacts.traces.clients import clients_of

    return clients_of(text)


@resumable()
def _simulated(deployment: "DeploymentPlan") -> "DeploymentPlan":
    """The plan with every preset replayed on synthetic routers, which takes most of a minute."""
    from moectl.commands.start.plan.simulation import simulated
    from moectl.shared.terminal.progress import progress_bar

    with progress_bar("simulating", unit="presets") as advance:
        return simulated(deployment, advance)
