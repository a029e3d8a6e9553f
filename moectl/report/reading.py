"""The store as the source of a report: which benches to show, and rows of queries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from artifacts.store.store import Store
from moectl.report import queries
from moectl.show import grounds

Record = dict[str, object]
LIVE = "live"
SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class StoredBench:
    """A bench in the store: its digest, and its mode `live` or `simulated`."""

    digest: str
    mode: str

    @property
    def is_live(self) -> bool:
        return self.mode == LIVE


class ReportSource:
    """Reads one model from an open store. `jobs` are the benches to show, the leading one first."""

    def __init__(
        self, store: Store, *, job: str | None = None, model_id: str | None = None
    ) -> None:
        """The leading bench is `job`, else the newest live one, else the newest, of `model_id` if
        given."""
        self._store = store
        benches = [
            bench
            for bench in store.query(queries.JOBS).to_pylist()
            if model_id in (None, bench["model"])
        ]
        benches.sort(
            key=lambda bench: (bench["job"] != job, bench["mode"] != "live", -bench["newest"])
        )
        self.model_id = model_id or (benches[0]["model"] if benches else _newest_model(store))
        same = [bench for bench in benches if bench["model"] == self.model_id]
        modes = dict.fromkeys(bench["mode"] for bench in same)
        self.jobs = [
            next(StoredBench(bench["job"], mode) for bench in same if bench["mode"] == mode)
            for mode in modes
        ]

        # one, or none in an empty store
        self.models = self.rows(queries.filled(queries.MODELS, model=self.model_id))

    def conditions(self, job: StoredBench) -> Record:
        """Data, machine and effort of a bench."""
        return self.rows(queries.filled(queries.CONDITIONS, jobs=[job.digest]))[0]

    def told(self, job: StoredBench) -> list[str]:
        """Return the grounds of a bench's times in words, over each of its links."""
        rows = self.rows(queries.filled(queries.TABLE, job=job.digest))
        return list(dict.fromkeys(self.grounds(job, row["link"]).says for row in rows))

    def grounds(self, job: StoredBench, link: str) -> grounds.Grounds:
        """Return the grounds of the times of a bench over this link."""
        conditions = self.conditions(job)
        if job.is_live:
            return grounds.measured(link, device=conditions["device"])
        return grounds.simulated(conditions["machine"], conditions["experts_bytes"])

    def heading(self, job: StoredBench, row: Record) -> str:
        """Budget and link of a row; without a link that its grounds name."""
        return (
            place(row) if self.grounds(job, row["link"]).is_absolute else of_experts(row["budget"])
        )

    def rows(self, query: str) -> list[Record]:
        return self._store.query(query).to_pylist()

    def newest(self, table: str) -> int | None:
        """The newest run of this model that wrote rows of a table."""
        return self.rows(queries.filled(queries.NEWEST, model=self.model_id, path=f"$.{table}"))[0][
            "run"
        ]


def grouped(rows: Sequence[Record], *names: str) -> Iterator[tuple[tuple, list[Record]]]:
    """Group consecutive rows that agree in these columns."""
    for key, same in groupby(rows, key=lambda row: tuple(row[name] for name in names)):
        yield key, list(same)


def place(row: Record) -> str:
    """Budget and link of a row, in words."""
    link = "" if row["link"] == "auto" else f", {row['link']}"
    return of_experts(row["budget"]) + link


def of_experts(budget: object) -> str:
    """A budget in words."""
    return f"{budget} of the experts" if str(budget).endswith("%") else str(budget)


def _newest_model(store: Store) -> str | None:
    model_ids = [run.info.model_id for run in store.runs() if run.info.model_id]
    return model_ids[-1] if model_ids else None
