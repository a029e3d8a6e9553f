"""Scores a session on tasks of lm-evaluation-harness: the built-in ones, the user's files, or the
harness's own."""

import hashlib
import importlib.util
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from artifacts.common.suggestions import unknown
from artifacts.common.untrusted import existing
from artifacts.errors import BadInput, BadUsage, first_line
from profilers.compare import continuations
from runtime.policies.presets import preset
from runtime.session.session import Session

BUILT_IN: Mapping[str, Callable[[], dict[str, Any]]] = {
    continuations.NAME: continuations.configuration
}
HARNESS = "lm-eval:"  # prefix of the harness's own tasks
_RESAMPLED = 100  # bootstrap samples, for metrics without a formula for the standard error
FORMS = f"a YAML file of a task, a folder of them, or {HARNESS}NAME for one of the harness's own"


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One metric of one task: its value, its standard error if known, and the number of
    documents."""

    task: str
    metric: str
    value: float
    stderr: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks to evaluate; `digest` covers their documents and configurations."""

    loaded: tuple[Any, ...]
    digest: str


def check_tasks(names: Sequence[str]) -> None:
    """Raise BadUsage where the harness is not installed, or for a name without a task."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BadUsage("--tasks needs lm-evaluation-harness: run `pip install 'moectl[eval]'`")
    for name in names:
        if not name.startswith(HARNESS) and name not in BUILT_IN:
            _files(name)


def load_tasks(names: Sequence[str]) -> Tasks:
    """Read every task with its documents. Raises BadInput for a task that the harness cannot load,
    and BadUsage for two tasks of the same name."""
    import datasets
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    from profilers.compare.task_files import keep_templates_in

    datasets.disable_progress_bars()
    keep_templates_in()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = [task for name in names for task in _load(name)]
    twice = [
        name for name, count in Counter(task.task_name for task in loaded).items() if count > 1
    ]
    if twice:
        raise BadUsage(
            f"--tasks names {twice[0]} twice: leave one out, or give it another name in its file"
        )
    for task in loaded:
        task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    contents = [(task.config.to_dict(), list(task.eval_docs)) for task in loaded]
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]
    return Tasks(tuple(loaded), digest)


def evaluate(session: Session, tasks: Tasks, *, batch: int | None = None) -> tuple[TaskScore, ...]:
    """Return every metric of every task, `batch` requests at a time: by default 64, or one where
    policies alter the output, by what is resident. Likelihoods are computed in one pass over
    question and answer; generated answers are decoded token by token."""
    results = evaluated(session, tasks, batch)["results"]
    return tuple(score for task, values in results.items() for score in _scores(task, values))


def evaluated(
    session: Session, tasks: Tasks, batch: int | None = None, *, keeps_items: bool = False
) -> dict[str, Any]:
    """Return what the harness returns of `evaluate`; its "samples" only if it `keeps_items`."""
    from lm_eval.evaluator import evaluate as harness

    from profilers.compare.lm_eval_model import SessionLM

    task_dict = {
        "tasks": {task.task_name: task for task in tasks.loaded},
        "groups": {},
        "group_map": {},
    }
    model = SessionLM(session, batch_size=batch or _batch_of(session))
    # hides its progress bars, which would break up moectl's own
    with redirect_stderr(io.StringIO()):
        return harness(model, task_dict, log_samples=keeps_items, bootstrap_iters=_RESAMPLED)


def _batch_of(session: Session) -> int | str:
    settings = session.parts.settings
    return "auto" if replace(preset(settings.preset), **settings.policies).is_lossless else 1


def _files(name: str) -> list[Path]:
    """Return the YAML files that a name stands for."""
    path = existing(name)
    paths = [] if path is None else sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not paths:
        raise BadUsage(f"{unknown('task', name, BUILT_IN)} (or give {FORMS})")
    return paths


def _load(name: str) -> list[Any]:
    from lm_eval.tasks import TaskManager

    from profilers.compare.task_files import check_task_file

    if name.startswith(HARNESS):
        return _built(TaskManager(), name.removeprefix(HARNESS), name)
    manager = TaskManager(include_defaults=False)
    if name in BUILT_IN:
        return _built(manager, BUILT_IN[name](), name)
    loaded = []
    for path in map(Path.resolve, _files(name)):
        check_task_file(path)
        with chdir(path.parent):  # the data files that the task names are relative to its folder
            loaded += _built(manager, str(path), name)
    return loaded


def _built(manager: Any, spec: str | dict[str, Any], name: str) -> list[Any]:
    try:
        return list(manager.load([spec])["tasks"].values())
    except Exception as error:  # errors of YAML, templates, data files and the hub
        raise BadInput(
            f"the task {name} cannot be loaded ({type(error).__name__}: {first_line(error)}): "
            f"give {FORMS}"
        ) from error


def _scores(task: str, values: dict[str, Any]) -> list[TaskScore]:
    """Return the scores in the harness's `{"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len":
    40, ...}`."""
    scores = []
    for key, value in values.items():
        metric, _, rest = key.partition(",")
        if not rest or metric.endswith("_stderr") or not isinstance(value, float | int):
            continue
        stderr = values.get(f"{metric}_stderr,{rest}")
        label = metric if rest == "none" else key
        error = float(stderr) if isinstance(stderr, float | int) else None
        scores.append(TaskScore(task, label, float(value), error, int(values["sample_len"])))
    return scores
