"""How well a session does tasks of lm-evaluation-harness: those of local files, ours, or the harness's own."""

import hashlib
import importlib.util
import io
import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from artifacts.common.suggestions import unknown
from artifacts.common.untrusted import existing
from artifacts.errors import BadInput, BadUsage, first_line
from runtime.session.session import Session

BUILT_IN = files("profilers.compare") / "questions"
HARNESS = "lm-eval:"  # before the name of one of the harness's own tasks
_RESAMPLED = 100  # times, for the errors of metrics that have no formula for theirs
FORMS = f"a YAML file of a task, a folder of them, or {HARNESS}NAME for one of the harness's own"


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One metric of one task: its value, its standard error where one is known, and over how many documents."""

    task: str
    metric: str
    value: float
    stderr: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Tasks:
    """What to evaluate; `digest` is of all documents and of what is made of them."""

    loaded: tuple[Any, ...]
    digest: str


def built_in() -> list[str]:
    """The names of our own tasks."""
    return sorted(Path(each.name).stem for each in BUILT_IN.iterdir() if each.name.endswith(".yaml"))


def check_tasks(names: Sequence[str]) -> None:
    """Raise BadUsage where the harness is not installed, or for a name that leads nowhere."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BadUsage("--tasks needs lm-evaluation-harness: run `pip install 'moectl[eval]'`")
    for name in names:
        if not name.startswith(HARNESS):
            _files(name)


def load_tasks(names: Sequence[str]) -> Tasks:
    """Read every task with its documents. Raises BadInput for one that the harness cannot make sense of, and BadUsage
    for two of one name."""
    import datasets
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    from profilers.compare.task_files import keep_templates_in

    datasets.disable_progress_bars()
    keep_templates_in()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = [task for name in names for task in _load(name)]
    twice = [name for name, count in Counter(task.task_name for task in loaded).items() if count > 1]
    if twice:
        raise BadUsage(f"--tasks names {twice[0]} twice: leave one out, or give it another name in its file")
    for task in loaded:
        task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    told = [(task.config.to_dict(), list(task.eval_docs)) for task in loaded]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return Tasks(tuple(loaded), digest)


def evaluate(session: Session, tasks: Tasks) -> tuple[TaskScore, ...]:
    """Every metric of every task. A score of likelihood is of one pass over question and answer; what is generated is
    decoded token by token."""
    from lm_eval.evaluator import evaluate as harness

    from profilers.compare.lm_eval_model import SessionLM

    given = {"tasks": {task.task_name: task for task in tasks.loaded}, "groups": {}, "group_map": {}}
    with redirect_stderr(io.StringIO()):  # its bars, a few for each session, which would tear apart our own
        found = harness(SessionLM(session), given, log_samples=False, bootstrap_iters=_RESAMPLED)
    return tuple(score for task, values in found["results"].items() for score in _scores(task, values))


def _files(name: str) -> list[Path]:
    """The YAML files that a name stands for."""
    path = existing(name)
    found = [] if path is None else sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not found and name in built_in():
        return [Path(str(BUILT_IN / f"{name}.yaml"))]
    if not found:
        raise BadUsage(f"{unknown('task', name, built_in())}; or give {FORMS}")
    return found


def _load(name: str) -> list[Any]:
    from lm_eval.tasks import TaskManager

    from profilers.compare.task_files import check_task_file

    if name.startswith(HARNESS):
        own = name.removeprefix(HARNESS)
        return _built(TaskManager(), own, name)
    manager = TaskManager(include_defaults=False)
    loaded = []
    for path in map(Path.resolve, _files(name)):
        check_task_file(path)
        with chdir(path.parent):  # where the data files that it names lie
            loaded += _built(manager, str(path), name)
    return loaded


def _built(manager: Any, spec: str, name: str) -> list[Any]:
    try:
        return list(manager.load([spec])["tasks"].values())
    except Exception as error:  # whatever YAML, templates, data files and the hub can do wrong
        raise BadInput(
            f"the task {name} cannot be loaded ({type(error).__name__}: {first_line(error)}): give {FORMS}"
        ) from error


def _scores(task: str, values: dict[str, Any]) -> list[TaskScore]:
    """Of the harness's `{"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 40, ...}`."""
    found = []
    for key, value in values.items():
        metric, _, rest = key.partition(",")
        if not rest or metric.endswith("_stderr") or not isinstance(value, float | int):
            continue
        stderr = values.get(f"{metric}_stderr,{rest}")
        named = metric if rest == "none" else key
        known = float(stderr) if isinstance(stderr, float | int) else None
        found.append(TaskScore(task, named, float(value), known, int(values["sample_len"])))
    return found
