"""The head of a report and its first section: model, machine, workload, date and product."""

from collections.abc import Callable
from html import escape

from artifacts.hardware.machines import HERE
from artifacts.shape import FULL_BITS
from moectl.report import queries
from moectl.report.markup import Section, data, nbytes, whole
from moectl.report.reading import Record, ReportSource, StoredBench

_TITLE = "Environment and workload"


def title(source: ReportSource) -> str:
    """The model, and the machine of the leading bench."""
    names = [str(model["name"]).rstrip("/").rsplit("/", 1)[-1] for model in source.models]
    if not source.jobs:
        return names[0] if names else "An empty store"
    conditions = source.conditions(source.jobs[0])
    return (names[0] if names else conditions["model"]) + _machine(conditions, source.jobs[0])


def environment(source: ReportSource) -> Section:
    if not source.models and not source.jobs:
        return Section(
            "environment",
            _TITLE,
            missing="Nothing was run yet: <code>moectl profile</code> begins.",
        )
    entries = {"Model": _model(source.models[0])} if source.models else {}
    asked = [queries.filled(queries.MODELS, model=source.model_id)]
    for job in source.jobs:
        conditions = source.conditions(job)
        asked.append(queries.filled(queries.CONDITIONS, job=job.digest))
        entries |= _OF_MODE[job.mode](source, job, conditions)
        bases = _base(conditions)
        if bases:
            entries["Weights"] = bases
    shown = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in entries.items())
    return Section("environment", _TITLE, f"<dl>{shown}</dl>", tuple(asked))


def _model(model: Record) -> str:
    return (
        f"{escape(model['family'])}: {data(model['num_layers'], whole)} layers of "
        f"{data(model['num_experts'], whole)} experts, {data(model['top_k'], whole)} a token; an "
        f"expert has {data(model['expert_bytes'], nbytes)}, all of them "
        f"{data(model['experts_bytes'], nbytes)}"
    )


def _machine(conditions: Record, job: StoredBench) -> str:
    if job.is_live:
        return f" on {conditions['gpu'] or conditions['processor']}"
    return (
        ", simulated on "
        f"{'this machine' if conditions['machine'] == HERE else conditions['machine']}"
    )


def _measured(source: ReportSource, job: StoredBench, row: Record) -> dict[str, str]:
    gpu = f", {escape(row['gpu'])}" if row["gpu"] else ", no GPU"
    cores = f"{_counted(row['cores'], 'core')}, " if row["cores"] else ""
    return {
        "Machine": (
            f"{escape(str(row['processor']))}{gpu}: "
            f"{cores}{_counted(row['threads'], 'thread')} in use"
        ),
        "Measured live": (
            f"{data(row['tokens'], whole)} tokens{_asked(row)} of {escape(str(row['data']))} "
            f"in texts of {data(row['length'], whole)}; {_counted(row['rounds'], 'round')} "
            f"in random order, medians. {_grounds(source, job)}"
        ),
        "Quality": f"against the full model on the same tokens{_scored(row)}",
    }


def _simulated(source: ReportSource, job: StoredBench, row: Record) -> dict[str, str]:
    return {
        "Simulated": (
            f"{data(row['tokens'], whole)} tokens of {escape(str(row['data']))}, "
            f"each setting from an empty cache. {_grounds(source, job)}"
        )
    }


_OF_MODE: dict[str, Callable[[ReportSource, StoredBench, Record], dict[str, str]]] = {
    "live": _measured,
    "simulated": _simulated,
}


def _grounds(source: ReportSource, job: StoredBench) -> str:
    """Return a line on the grounds of a bench's times, over each of its links."""
    told = dict.fromkeys(source.grounds(job, link).says for link in source.links(job))
    return f"Times: {escape('; '.join(told))}."


def _base(row: Record) -> str:
    """The base of budgets and quality, if it is not the checkpoint."""
    experts = (
        ""
        if row["base"] == FULL_BITS
        else f"every expert is a replica of {data(row['base'], whole)} bits"
    )
    dense = "" if row["dense"] is None else f"dense weights have {data(row['dense'], whole)} bits"
    return "; ".join(filter(None, (experts, dense)))


def _asked(row: Record) -> str:
    is_less = None not in (row["tokens"], row["asked"]) and row["tokens"] < row["asked"]
    return f" ({data(row['asked'], whole)} were asked for)" if is_less else ""


def _scored(row: Record) -> str:
    return "" if row["scored"] is None else f", {data(row['scored'], whole)} of which are scored"


def _counted(number: object, what: str) -> str:
    return f"{data(number, whole)} {what}{'' if number == 1 else 's'}"
