"""Option groups: dataclasses whose fields carry Typer's annotations, so that an option is written
down once; and the option that every command with a model has."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, TypeVar, get_type_hints

import typer
from typer.models import ArgumentInfo

from artifacts.common.untrusted import existing
from artifacts.errors import BadUsage
from moectl.cli.panels import in_order, shown

Built = TypeVar("Built")
_Revision = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of a model on the hub: a branch, a tag or a commit."),
]


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of each option group in the group's place, as Typer reads
    them.

    A parameter whose type is a dataclass is a group. The returned function takes the values of the
    fields and builds the groups from them. Options get their panels and values' names. A command
    with an argument `model` gets the option `--revision`, which becomes a part of the model's name.
    A name that two groups share is refused with ValueError.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(command)
    def run(**values: object) -> None:
        if revision := values.pop("revision", None):
            values["model"] = _at_revision(values["model"], revision)
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    run.__signature__ = Signature(in_order(_parameters(command, hints, groups)))
    run.__annotations__ = {
        name: parameter.annotation for name, parameter in run.__signature__.parameters.items()
    }
    return run


def _parameters(
    command: Callable[..., None], hints: dict[str, object], groups: dict[str, type]
) -> Iterator[Parameter]:
    for parameter in signature(command).parameters.values():
        if parameter.name not in groups:
            annotation = shown(parameter.name, hints[parameter.name])
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=annotation)
            if parameter.name == "model" and _is_argument(annotation):
                annotation = shown("revision", _Revision)
                yield Parameter(
                    "revision", Parameter.KEYWORD_ONLY, default=None, annotation=annotation
                )
            continue
        kind = groups[parameter.name]
        of_group = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            annotation = shown(field.name, of_group[field.name])
            yield Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
            )


def _is_argument(annotation: object) -> bool:
    return any(isinstance(each, ArgumentInfo) for each in getattr(annotation, "__metadata__", ()))


def _at_revision(model: str | None, revision: str) -> str:
    """Return the name of a model of the hub with its revision. Raises BadUsage for another."""
    if model is None or existing(model) or "@" in model:
        raise BadUsage(f"--revision {revision} goes with a model of the hub, as owner/name")
    return f"{model}@{revision}"


def fill(kind: type[Built], *groups: object, **others: object) -> Built:
    """Build a dataclass from the fields of the groups that it has too, and from `others`, which
    take precedence."""
    names = {field.name for field in fields(kind)}
    values = {
        field.name: getattr(group, field.name)
        for group in groups
        for field in fields(group)
        if field.name in names
    }
    return kind(**values | others)
