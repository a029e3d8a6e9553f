"""Checks users' task files before lm-evaluation-harness reads them, because it would run the code
that they name.

The harness imports functions named by `!function`, loads unknown metrics as scripts, and gives
templates access to Python.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from artifacts.errors import BadInput, first_line

_MOST_NODES = 100_000  # with anchors unfolded
_STANDARD = "tag:yaml.org,2002:"


def check_task_file(path: Path, *, seen: frozenset[Path] = frozenset()) -> None:
    """Raise BadInput for a file that is not YAML, names code or unfolds without end, or that
    includes a file of that kind."""
    if path in seen:
        raise BadInput(f"the task file {path} includes itself: leave that out")
    try:
        text = path.read_text(encoding="utf-8")
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), path)
        config = yaml.safe_load(text)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        raise BadInput(
            f"the task file {path} cannot be loaded ({first_line(error)}): give a YAML file of a "
            "task"
        ) from error
    for mapping in _mappings(config):
        _check_metric(mapping, path)
    included = config.get("include", []) if isinstance(config, Mapping) else []
    for name in included if isinstance(included, list) else [included]:
        check_task_file((path.parent / str(name)).resolve(), seen=seen | {path})


def keep_templates_in() -> None:
    """Make the harness render templates in a sandbox without access to Python."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    theirs = utils.env
    if not isinstance(theirs, ImmutableSandboxedEnvironment):
        utils.env = ImmutableSandboxedEnvironment(
            undefined=theirs.undefined, keep_trailing_newline=True
        )
        utils.env.filters.update(theirs.filters)


def _check_nodes(root: yaml.Node | None, path: Path) -> None:
    """Raise BadInput for tags other than the standard ones, and for too many entries behind
    anchors."""
    sizes: dict[int, int] = {}
    if root is not None and _size(root, sizes, path) > _MOST_NODES:
        raise BadInput(
            f"the task file {path} unfolds to more than {_MOST_NODES:,} entries: write it out"
        )


def _size(node: yaml.Node, sizes: dict[int, int], path: Path) -> int:
    if id(node) in sizes:
        return sizes[id(node)]
    if not node.tag.startswith(_STANDARD) or "python" in node.tag:
        raise BadInput(
            f"the task file {path} names code ({node.tag}), which moectl does not run: use "
            "templates"
        )
    sizes[id(node)] = _MOST_NODES  # a node that contains itself would have no end
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    flat = (
        [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
    )
    sizes[id(node)] = 1 + sum(_size(part, sizes, path) for part in flat)
    return sizes[id(node)]


def _check_metric(mapping: Mapping, path: Path) -> None:
    import lm_eval.api.metrics  # noqa: F401  # fills the registry
    from lm_eval.api.registry import metric_registry

    metric = mapping.get("metric")
    is_own = (
        isinstance(metric, str) and metric in metric_registry and not mapping.get("hf_evaluate")
    )
    if metric is not None and not is_own:
        raise BadInput(
            f"the task file {path} has metric {str(metric)[:40]!r}, which is none of the "
            "harness's own"
        )


def _mappings(value: object) -> Iterator[Mapping]:
    if isinstance(value, Mapping):
        yield value
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _mappings(part)
