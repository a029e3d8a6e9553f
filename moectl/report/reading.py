"""A store as a report reads it: which runs it shows, and rows of queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from artifacts.store.store import Store
from moectl.report import queries

Record = dict[str, object]


@dataclass(frozen=True, slots=True)
class Job:
    """A bench of the store: its digest, `live` or `simulated`."""

    digest: str
    mode: str


class Reading:
    """One model in an open store. `jobs` are the benches to show, the one that leads first."""

    def __init__(self, store: Store, *, job: str | None = None, model_id: str | None = None) -> None:
        """Of the bench `job`, else of the newest live one, else of the newest; of one model if it is given."""
        self._store = store
        found = [one for one in store.query(queries.JOBS).to_pylist() if model_id in (None, one["model"])]
        newest = sorted(found, key=lambda one: (one["job"] != job, one["mode"] != "live", -one["newest"]))
        self.model_id = model_id or (newest[0]["model"] if newest else _newest_model(store))
        same = [one for one in newest if one["model"] == self.model_id]
        modes = dict.fromkeys(one["mode"] for one in same)
        self.jobs = [next(Job(one["job"], mode) for one in same if one["mode"] == mode) for mode in modes]

    def rows(self, query: str) -> list[Record]:
        return self._store.query(query).to_pylist()

    def newest(self, table: str) -> int | None:
        """The newest run of this model that wrote rows of a table."""
        return self.rows(queries.NEWEST.format(model=self.model_id, table=table))[0]["run"]


def grouped(rows: Sequence[Record], *names: str) -> Iterator[tuple[tuple, list[Record]]]:
    """Rows in a row that share these columns."""
    for key, same in groupby(rows, key=lambda row: tuple(row[name] for name in names)):
        yield key, list(same)


def place(row: Record) -> str:
    """What a row was measured at."""
    link = "" if row["link"] == "auto" else f", {row['link']}"
    return of_experts(row["budget"]) + link


def of_experts(budget: object) -> str:
    """A budget in words."""
    return f"{budget} of the experts" if str(budget).endswith("%") else str(budget)


def _newest_model(store: Store) -> str | None:
    found = [run.info.model_id for run in store.runs() if run.info.model_id]
    return found[-1] if found else None
