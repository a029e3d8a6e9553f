"""Sections of a page: templates, which escape what they show, filled with rows of queries."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from artifacts.hardware.machines import HERE
from artifacts.shape import FULL_BITS
from artifacts.store.runs import versions
from moectl.bundled import is_bundled
from moectl.charts.plots import heatmap
from moectl.charts.scales import LEVELS
from moectl.report import figures, numbers, queries
from moectl.report.reading import ReportSource, StoredBench, grouped, place
from moectl.show.grounds import compared
from moectl.show.losses import LEAST_SCORED, is_distinguishable

_TABLES = ("activations", "coactivations", "similarity", "quant_loss", "splits")
_MOST_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page. Unless `is_known`, the store has not its data, and `html` says how to
    make them."""

    key: str
    title: str
    html: Markup
    is_known: bool


class Sections:
    """Fills the templates of sections from a source."""

    def __init__(self, source: ReportSource) -> None:
        self.source = source
        names = [str(row["name"]) for row in source.models]
        # after a space, in commands that would else use the bundled model
        self._model = "" if not names or is_bundled(names[0]) else f" {shlex.quote(names[0])}"
        self._asked = {
            "model": source.model_id,
            "jobs": [bench.digest for bench in source.jobs],
            "runs": sorted({run for run in map(source.newest, _TABLES) if run is not None}),
            "layers": _some_layers(source),
        }

    def fill(
        self,
        kind: str,
        title: str,
        asked: Mapping[str, str],
        *,
        key: str = "",
        run: int | None = None,
        job: StoredBench | None = None,
    ) -> Section:
        """Return a section of this kind with the rows of these queries, each by its name."""
        filled = {
            name: queries.filled(query, run=run, job=job and job.digest, **self._asked)
            for name, query in asked.items()
        }
        rows = {name: self.source.rows(query) for name, query in filled.items()}
        known = [query for name, query in filled.items() if rows[name]]
        at = {"key": key or kind, "title": title}
        html = template(f"sections/{kind}").render(
            queries=known,
            source=self.source,
            job=job,
            model=self._model,
            **(at | rows),
        )
        return Section(html=Markup(html), is_known=bool(known), **at)


def template(name: str) -> Template:
    """Return a template of the page by its path."""
    return _ENVIRONMENT.get_template(f"{name}.html")


def _some_layers(source: ReportSource) -> list[int]:
    """A few layers, evenly spaced from the first to the last."""
    last = source.models[0]["num_layers"] - 1 if source.models else 0
    count = min(_MOST_LAYERS, last + 1)
    return sorted({round(number * last / max(count - 1, 1)) for number in range(count)})


_ENVIRONMENT = Environment(
    loader=PackageLoader("moectl.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_CALLED = (
    *(numbers.data, numbers.hundredths, numbers.nbytes, numbers.percent, numbers.ratio),
    *(numbers.short, numbers.times, numbers.whole),
    *(
        figures.Column,
        figures.advised,
        figures.by_layer,
        figures.compared_with_buddies,
        figures.has_ms,
    ),
    *(figures.known, figures.largest, figures.matrix, figures.places, figures.split_experts),
    *(figures.time_and_quality, figures.times_by_preset, figures.used_of_prefetched),
    *(compared, grouped, heatmap, is_distinguishable, place),
)
_ENVIRONMENT.filters["quote"] = shlex.quote
_ENVIRONMENT.globals |= {each.__name__: each for each in _CALLED} | {
    "full_bits": FULL_BITS,
    "here": HERE,
    "installed": versions().get("moectl", "(not installed)"),
    "least_scored": LEAST_SCORED,
    "levels": LEVELS,
}
