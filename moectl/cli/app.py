"""The application: the modules of `moectl.cli` register its commands here."""

from typing import Annotated

import typer

app = typer.Typer(
    name="moectl",
    help="Run a Mixture-of-Experts model that is larger than the memory of the GPU.",
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass
