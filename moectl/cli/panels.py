"""Layout of options in `--help`: the panel of each option, and the placeholder for its value."""

from collections.abc import Iterable
from copy import copy
from inspect import Parameter
from pathlib import Path
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from typer.models import OptionInfo

# By panel, the names of parameters; what is not named here is a command's own and stands in its
# first panel.
PANELS = {
    "Model and prompt": "prompt is_chat revision",
    "Policy": "preset routing prefetch eviction miss residency scope avg_bits",
    "Memory and link": "budget link device devices threads base dense kv_cache_dtype experts "
    "activations draft",
    "Sampling": "max_new_tokens greedy temperature top_k top_p repetition_penalty ignore_eos",
    "Server": (
        "host port api_key served_model_name cors_origin strict ctx_size rows kept_prompts queue"
    ),
    "Output": "verbose json picture",
    "Expert": "near scaled_to window decide reconfigure_every learn verify executor jobs",
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
_VALUES = {bool: "", int: "N", float: "N", str: "TEXT", Path: "PATH"}


def shown(name: str, annotation: object) -> object:
    """Return the annotation of a parameter with its option in its panel; of anything but an option,
    unchanged."""
    option = _option(annotation)
    if option is None:
        return annotation
    option = copy(option)
    option.rich_help_panel = option.rich_help_panel or _PANEL_OF.get(name)
    option.metavar = (
        _VALUES.get(_kind(annotation.__origin__)) if option.metavar is None else option.metavar
    )
    return Annotated[annotation.__origin__, option]


def in_order(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters with those of each panel together, a command's own first: the help has
    them in this order."""
    panels = [None, *PANELS]

    def place(parameter: Parameter) -> int:
        option = _option(parameter.annotation)
        return panels.index(option.rich_help_panel) if option else 0

    return sorted(parameters, key=place)


def _option(annotation: object) -> OptionInfo | None:
    return next(
        (each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, OptionInfo)),
        None,
    )


def _kind(annotation: object) -> object:
    """The type of a value that may be None."""
    if get_origin(annotation) in (Union, UnionType):
        return next(kind for kind in get_args(annotation) if kind is not type(None))
    return annotation
