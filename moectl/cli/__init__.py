"""The command line: finds the file of a command, and has the options that commands share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from moectl.shared.terminal.neighbours import refuse_surroundings

# before the imports below, which would fail somewhere inside another distribution's `artifacts`
refuse_surroundings()

from artifacts.errors import BadUsage  # noqa: E402
from moectl.cli.config_file import Configured  # noqa: E402
from moectl.cli.examples import epilog  # noqa: E402
from moectl.cli.groups import flattened  # noqa: E402
from moectl.shared.terminal.exit_codes import exit_code_of  # noqa: E402
from moectl.shared.terminal.streams import prepare_streams  # noqa: E402

__all__ = ["app", "main"]

_CHAPTERS = {
    "start": "demo run chat generate serve plan advise models doctor",
    "measure": "bench price tune simulate report fit-trace",
    "build": "profile build-buddies quantize split build-maps build-predictor",
    "store": "inspect export merge import-trace pack",
}
"""Chapters of `moectl --help`, each with the order of its commands; others follow these."""


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


class _Commands(Mapping[str, TyperCommand]):
    """The commands by name, in the order of `moectl --help`. Each is a module, or a folder, in the
    folder of its chapter in `moectl/commands`, with a function of its name; what is not asked for
    is not imported."""

    def __init__(self) -> None:
        self._chapters: dict[str, str] = {}
        for chapter, names in _CHAPTERS.items():
            modules = iter_modules([str(Path(__file__).parents[1] / "commands" / chapter)])
            found = sorted(module.name.replace("_", "-") for module in modules)
            self._chapters |= dict.fromkeys([*names.split(), *found], chapter)

    def __getitem__(self, name: str) -> TyperCommand:
        chapter = self._chapters[name]
        stem = name.replace("-", "_")
        module = import_module(f"moectl.commands.{chapter}.{stem}")
        alone = typer.Typer(add_completion=False)
        named = alone.command(
            name, cls=Configured, rich_help_panel=chapter.title(), epilog=epilog(name)
        )
        named(flattened(getattr(module, stem)))
        return get_command(alone)

    def get(self, name: str, default: None = None) -> TyperCommand | None:
        """Return a command, or `default` where no file has its name; a KeyError while a command is
        imported stays one."""
        return self[name] if name in self._chapters else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._chapters)

    def __len__(self) -> int:
        return len(self._chapters)


class _Program(TyperGroup):
    def __init__(self, **options: object) -> None:
        super().__init__(**options | {"commands": _Commands()})

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
