"""Option groups: a command has the fields of its groups as parameters, and receives the groups."""

from dataclasses import dataclass, is_dataclass
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from moectl.cli import app
from moectl.cli.groups import fill, flattened


@dataclass(frozen=True, slots=True)
class Size:
    width: Annotated[int, typer.Option(min=1)] = 2
    height: int = 3


@dataclass(frozen=True, slots=True)
class Box:
    width: int
    height: int
    depth: int = 0


def test_the_fields_stand_in_the_place_of_the_group() -> None:
    def command(*, name: str = "x", size: Size, depth: int = 4) -> None:
        """Draw a box."""

    flat = flattened(command)
    assert list(signature(flat).parameters) == ["name", "width", "height", "depth"]
    assert [each.default for each in signature(flat).parameters.values()] == ["x", 2, 3, 4]
    assert flat.__doc__ == "Draw a box."


def test_typer_builds_the_group() -> None:
    seen = []

    def command(*, size: Size, depth: int = 4) -> None:
        seen.append((size, depth))

    own = typer.Typer()
    own.command()(flattened(command))
    assert CliRunner().invoke(own, ["--height", "7"]).exit_code == 0
    assert CliRunner().invoke(own, ["--width", "0"]).exit_code == 2
    assert seen == [(Size(2, 7), 4)]


def test_a_name_in_two_groups_is_refused() -> None:
    def command(*, size: Size, width: int = 1) -> None: ...

    with pytest.raises(ValueError, match="width"):
        flattened(command)


def test_fill_takes_what_both_have_and_others_first() -> None:
    assert fill(Box, Size(5, 6)) == Box(5, 6)
    assert fill(Box, Size(5, 6), height=1, depth=2) == Box(5, 1, 2)


def test_every_command_is_flat() -> None:
    for command in get_command(app).commands.values():
        assert not [
            one
            for one in signature(command.callback).parameters.values()
            if is_dataclass(one.annotation)
        ]
