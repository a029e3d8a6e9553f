"""The command line: `moectl COMMAND`, one module for each command."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from moectl.shared.neighbours import refuse_foreign

refuse_foreign()  # before the imports below, which would fail somewhere inside another distribution's `artifacts`

from moectl.cli import (  # noqa: E402
    bench,
    build_buddies,
    build_maps,
    build_predictor,
    demo,
    doctor,
    export,
    fit_trace,
    import_trace,
    inspect,
    pack,
    plan,
    profile,
    quantize,
    report,
    run,
    serve,
    simulate,
    split,
    tune,
)
from moectl.cli.groups import flattened  # noqa: E402
from moectl.shared.exit_codes import exit_code_of  # noqa: E402
from moectl.shared.streams import prepare_streams  # noqa: E402

__all__ = ["app", "main"]

app = typer.Typer(
    name="moectl",
    help="Run a Mixture-of-Experts model that is larger than the memory of the GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# In the order of `moectl --help`.
_COMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile,
    "merge": profile.merge,
    "build-buddies": build_buddies.build_buddies,
    "build-maps": build_maps.build_maps,
    "build-predictor": build_predictor.build_predictor,
    "quantize": quantize.quantize,
    "split": split.split,
    "fit-trace": fit_trace.fit_trace,
    "import-trace": import_trace.import_trace,
    "pack": pack.pack,
    "simulate": simulate.simulate,
    "bench": bench.bench,
    "tune": tune.tune,
    "plan": plan.plan,
    "run": run.run,
    "demo": demo.demo,
    "doctor": doctor.doctor,
    "serve": serve.serve,
    "inspect": inspect.inspect,
    "report": report.report,
    "export": export.export,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(flattened(_command))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from artifacts.store.runs import versions

        print("moectl", versions().get("moectl", "(not installed)"))
        raise typer.Exit


@app.callback()
def _moectl(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (by default that of the command line) and return its exit code."""
    prepare_streams()
    return exit_code_of(lambda: app(args=arguments, prog_name="moectl"), typed=arguments)
