"""The command line: `moectl COMMAND`, one module for each command."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.core import TyperGroup

from moectl.shared.neighbours import refuse_foreign

# before the imports below, which would fail somewhere inside another distribution's `artifacts`
refuse_foreign()

from artifacts.errors import BadUsage  # noqa: E402
from moectl.cli import (  # noqa: E402
    bench,
    build_buddies,
    build_maps,
    build_predictor,
    demo,
    doctor,
    export,
    fit_trace,
    generate,
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


@contextmanager
def _in_one_line() -> Iterator[None]:
    """A command line that cannot be taken is a problem of one line, as any other."""
    try:
        yield
    except typer.TyperException as error:
        # Without arguments Typer has printed the help by now, and the error says nothing.
        message = error.format_message().rstrip(".")
        context = getattr(error, "ctx", None)
        if not message:
            raise SystemExit(error.exit_code) from None
        raise BadUsage(
            f"{message} (see `{context.command_path if context else 'moectl'} --help`)"
        ) from None


class _Program(TyperGroup):
    def make_context(self, *args: object, **options: object) -> typer.Context:
        with _in_one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: typer.Context) -> object:
        with _in_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    name="moectl",
    cls=_Program,
    help="Run Mixture-of-Experts models bigger than memory; measure every shortcut.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# The chapters and their commands, in the order of `moectl --help`.
_CHAPTERS: dict[str, dict[str, Callable[..., None]]] = {
    "Start": {
        "demo": demo.demo,
        "run": run.run,
        "generate": generate.generate,
        "serve": serve.serve,
        "plan": plan.plan,
        "doctor": doctor.doctor,
    },
    "Measure": {
        "bench": bench.bench,
        "tune": tune.tune,
        "simulate": simulate.simulate,
        "report": report.report,
        "fit-trace": fit_trace.fit_trace,
    },
    "Build": {
        "profile": profile.profile,
        "build-buddies": build_buddies.build_buddies,
        "quantize": quantize.quantize,
        "split": split.split,
        "build-maps": build_maps.build_maps,
        "build-predictor": build_predictor.build_predictor,
    },
    "Store": {
        "inspect": inspect.inspect,
        "export": export.export,
        "merge": profile.merge,
        "import-trace": import_trace.import_trace,
        "pack": pack.pack,
    },
}
for _chapter, _commands in _CHAPTERS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_chapter)(flattened(_command))


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from artifacts.store.runs import versions

        print("moectl", versions().get("moectl", "(not installed)"))
        raise typer.Exit


@app.callback()
def _moectl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (by default that of the command line) and return its exit code."""
    prepare_streams()
    return exit_code_of(lambda: app(args=arguments, prog_name="moectl"), typed=arguments)
