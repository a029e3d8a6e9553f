"""Generated pages of the site: its home, which is README, one for each command from its `--help`,
the tables of the store, and SECURITY.md.

MkDocs calls `on_config` and `on_files` when it builds (mkdocs.yml names this file as a hook).
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.core import TyperArgument, TyperCommand, TyperOption
from typer.main import get_command

# `mkdocs` has the folder of its own program there, not this one
sys.path.insert(0, str(Path(__file__).parents[2]))

from artifacts.store.schema import SCHEMA_VERSION, TABLES, StoredColumn
from moectl.cli import app
from moectl.cli.examples import EXAMPLES
from tools import ROOT

# The page that describes a command at length, where it has another name.
TOLD = {
    "profile": "build",
    "merge": "build",
    "build-buddies": "build",
    "export": "build",
    "build-maps": "lab/maps",
    "build-predictor": "lab/prefetch",
    "quantize": "lab/quantisation",
    "split": "lab/splits",
    "bench": "measure",
    "simulate": "measure",
    "fit-trace": "measure",
    "price": "measure",
    "tune": "measure",
    "report": "measure",
    "advise": "plan",
    "import-trace": "lab/traces",
    "pack": "running",
    "run": "running",
    "generate": "running",
    "chat": "running",
    "models": "quickstart",
    "demo": "quickstart",
    "doctor": "plan",
    "inspect": "lab/reliability",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the commands into the navigation, where mkdocs.yml keeps an empty place for them."""
    [reference] = (part["Reference"] for part in config.nav if "Reference" in part)
    [place] = (part for part in reference if "Command line" in part)
    place["Command line"] = [path for path in pages() if path.startswith("commands/")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the folder."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Generated Markdown by path."""
    commands = get_command(app).commands
    index = (
        "\n\n".join(["# Commands", *(_chapter(*each) for each in _by_panel(commands.items()))])
        + "\n"
    )
    made = {f"commands/{name}.md": _command(name, command) for name, command in commands.items()}
    told = {"index.md": "README.md", "security.md": "SECURITY.md"}
    told = {page: (ROOT / name).read_text(encoding="utf-8") for page, name in told.items()}
    told = {page: text.replace("](docs/", "](") for page, text in told.items()}
    return {"commands/index.md": index, "schema.md": _schema(), **told, **made}


def _by_panel(named: Iterable[tuple[str, TyperCommand | TyperOption]]) -> list[tuple[str, dict]]:
    """Return commands or options by their panel of `--help`, in its order; "" if they have none."""
    panels: dict[str, dict] = {}
    for name, one in named:
        panels.setdefault(one.rich_help_panel or "", {})[name] = one
    return list(panels.items())


def _chapter(title: str, commands: dict[str, TyperCommand]) -> str:
    rows = [
        (f"[moectl {name}]({name}.md)", _line(command.help)) for name, command in commands.items()
    ]
    return _titled(title, _table(("command", "what it does"), rows))


def _titled(title: str, table: str) -> str:
    return f"## {title}\n\n{table}" if title else table


def _command(name: str, command: TyperCommand) -> str:
    shown = [one for one in command.params if not one.hidden]
    arguments = [one for one in shown if isinstance(one, TyperArgument)]
    options = [(one.name, one) for one in shown if isinstance(one, TyperOption)]
    usage = " ".join(["moectl", name, "[OPTIONS]", *map(_place, arguments)])
    tables = [_arguments(arguments)] if arguments else []
    tables += [_titled(title, _options(group)) for title, group in _by_panel(options)]
    table = "\n\n".join(tables)
    examples = "\n".join(EXAMPLES.get(name, ()))
    page = TOLD.get(name, name)
    told = f"More: [{page.rpartition('/')[2]}](../{page}.md)."
    return (
        f"# moectl {name}\n\n{_line(command.help)}\n\n```text\n{usage}\n\n{examples}\n```\n\n"
        f"{table}\n\n{told}\n"
    )


def _arguments(arguments: list[TyperArgument]) -> str:
    return _table(
        ("argument", "what it is"), [(f"`{_place(one)}`", _line(one.help)) for one in arguments]
    )


def _options(group: dict[str, TyperOption]) -> str:
    rows = [
        (f"`{', '.join((*one.opts, *one.secondary_opts))}`", _line(one.help), _default(one))
        for one in group.values()
    ]
    return _table(("option", "what it does", "default"), rows)


def _place(argument: TyperArgument) -> str:
    name = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _default(option: TyperOption) -> str:
    # depends on the reader's machine, not on the one that builds the site
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    return (
        ""
        if value is None or isinstance(value, bool) or callable(value) or value == ()
        else f"`{value}`"
    )


def _schema() -> str:
    parts = [
        f"# What the store holds\n\nThe tables of a store, schema version {SCHEMA_VERSION}: any "
        "DuckDB reads them, and finds what each column is in its comment."
    ]
    for name, each in TABLES.items():
        rows = [_column(*column) for column in each.columns.items()]
        parts.append(
            f"## {name}\n\nOne row per {each.row}.\n\n"
            f"{_table(('column', 'type', '', 'what it is'), rows)}"
        )
    return "\n\n".join(parts) + "\n"


def _column(name: str, column: StoredColumn) -> tuple[str, str, str, str]:
    rule = column.definition.removeprefix(column.type).strip()
    return f"`{name}`", f"`{column.type}`", _rule(rule), column.meaning


def _rule(text: str) -> str:
    rule = text.removeprefix("NOT NULL").strip()
    return f"`{rule}`" if rule else ""


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
