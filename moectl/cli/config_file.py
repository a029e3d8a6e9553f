"""`moectl.toml`: defaults of options, in the folder or in the user's own.

What is typed takes precedence, then a variable of the environment (MOECTL_STORE), then the file in
the folder, then the user's, then the default; that of `--store` depends on the folder
(`default_store`). An option above all tables holds for every command
that has it, one in the table of a command for that command.
"""

import tomllib
from pathlib import Path

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from artifacts.errors import BadInput, BadUsage
from moectl.cli.examples import EXAMPLES
from moectl.shared.defaults import default_store

_NAME = "moectl.toml"


class Configured(TyperCommand):
    """A command whose options have the defaults of the files."""

    def make_context(self, info_name: str | None, *args: object, **extra: object) -> typer.Context:
        values = {} if extra.get("resilient_parsing") else configured(self.name, self)
        return super().make_context(info_name, *args, default_map=values, **extra)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read options and arguments; `-m MODEL`, as llama.cpp has it, is the argument or the
        option of that name."""
        model = next((one for one in self.params if one.name == "model"), None)
        if isinstance(model, TyperArgument) and model == self._arguments()[0]:
            args = [arg for arg in args if arg != "-m"]
        elif isinstance(model, TyperOption):
            args = ["--model" if arg == "-m" else arg for arg in args]
        return super().parse_args(ctx, args)

    def _arguments(self) -> list[TyperArgument]:
        return [one for one in self.params if isinstance(one, TyperArgument)]


def configured(name: str, command: TyperCommand) -> dict[str, object]:
    """Return the defaults of a command's parameters, as files give them. Raises BadInput for a file
    that is no TOML, BadUsage for a table that is no command and for an unknown option."""
    own = {opt[2:]: one.name for one in command.params for opt in one.opts if opt[:2] == "--"}
    values: dict[str, object] = {"store": default_store()} if "store" in own else {}
    for path in (Path(typer.get_app_dir("moectl")) / _NAME, Path(_NAME)):
        given = _read(path)
        shared = {key: value for key, value in given.items() if not isinstance(value, dict)}
        table = given.get(name, {})
        if strays := sorted(given.keys() - shared.keys() - EXAMPLES.keys()):
            raise BadUsage(f"{path}: [{strays[0]}] is no command of moectl: see `moectl --help`")
        if unknown := sorted(table.keys() - own.keys()):
            raise BadUsage(
                f"{path}: [{name}] names {unknown[0]}, which is no option of `moectl {name}`: see "
                "its --help"
            )
        values |= {own[key]: value for key, value in (shared | table).items() if key in own}
    return values


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as TOML: {error}") from error
