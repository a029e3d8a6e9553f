"""The store: one DuckDB file in which every artefact belongs to the run that wrote it, whole or
absent."""

import json
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import TracebackType

import duckdb
import pyarrow as pa

from artifacts.common.untrusted import parse_json
from artifacts.errors import BadInput, Incompatible, first_line
from artifacts.shape import Shape
from artifacts.store.database import PATIENCE_S, checkpoint, limited, transaction
from artifacts.store.file import Identity, open_file, remove_made
from artifacts.store.intruders import Intruders
from artifacts.store.runs import ModelInfo, RunInfo, StoredRun, TableSize
from artifacts.store.schema import ARTEFACT_TABLES, TABLES, lacking, quoted
from artifacts.store.structure import check_size, stored_columns

_SELECT_RUNS = """
    SELECT run_id, contents, command, model_id, started_at, seconds, data, data_digest, tokens,
        seed, parameters, versions FROM runs WHERE status = 'complete'"""


class Store:
    """An open store; a context manager. While one process writes, no other may read or write.

    So open it late, write, and close it. A store that was created by opening it and never written
    to is removed on closing. Every method raises BadInput when the file turns out damaged and
    OutOfResources when the disk or memory is full.
    """

    def __init__(
        self,
        path: Path,
        connection: duckdb.DuckDBPyConnection,
        *,
        made: Identity | None,
        intruders: Intruders | None,
    ) -> None:
        self.path = path
        self._connection = connection
        self._unwritten = made
        self._intruders = intruders
        self._sized: set[str] = set()  # tables whose size was checked

    @classmethod
    def open(
        cls, path: str | Path, *, read_only: bool = False, patience_s: float | None = None
    ) -> "Store":
        """Open a store, or create it unless `read_only`. A writer upgrades an older store, after a
        copy. `patience_s` is how long to wait for another process that holds it.

        Raises BadInput (no store, no folder, damaged, some other kind of file), OutOfResources
        (another process holds it) and Incompatible (made by a newer moectl).
        """
        path = Path(path)
        connection, made = open_file(path, read_only=read_only, patience_s=patience_s)
        return cls(path, connection, made=made, intruders=None if read_only else Intruders(path))

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._intruders and not self._intruders.came():
            if self._unwritten:
                remove_made(self.path, self._unwritten)
            else:
                # What was committed lies in the write-ahead log, where the next command finds it,
                # if this fails.
                with suppress(duckdb.Error):
                    checkpoint(self._connection)
        self._unwritten = None
        self._connection.close()
        if self._intruders:
            self._intruders.close()
            self._intruders = None

    @property
    def nbytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size

    def models(self) -> list[ModelInfo]:
        """The models of this store, in the order in which they were added."""
        rows = self._rows(
            "SELECT name, fingerprint, family, num_layers, num_experts, top_k, expert_bytes FROM "
            "models"
        )
        return [ModelInfo(*row[:3], Shape(*row[3:])) for row in rows]

    def add_model(self, model: ModelInfo) -> str:
        """Add the model unless the store has it; return its `model_id`."""
        if all(other.fingerprint != model.fingerprint for other in self.models()):
            shape = model.shape
            row = [model.model_id, model.name, model.fingerprint, model.family]
            row += [shape.num_layers, shape.num_experts, shape.top_k, shape.expert_nbytes]
            self._intruders.check()
            with self._limited():
                self._connection.execute("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._unwritten = None
        return model.model_id

    def require_model(self, fingerprint: str, *, name: str) -> ModelInfo:
        """Return the entry of the model with this fingerprint; `name` is how a message calls it.

        Raises Incompatible, naming both sides, when the store holds artefacts of other models only.
        """
        models = self.models()
        for model in models:
            if model.fingerprint == fingerprint:
                return model
        others = ", ".join(f"{model.name} ({model.model_id})" for model in models) or "no model yet"
        since = (
            ", whose files have changed since"
            if any(model.name == name for model in models)
            else ""
        )
        raise Incompatible(
            f"{self.path} holds {others}, not {name} ({fingerprint[:16]}){since}; "
            "name another store or run moectl profile on this model first"
        )

    def write_run(
        self, run: RunInfo, tables: Mapping[str, pa.Table], *, instead_of: int | None = None
    ) -> int:
        """Write a run and its artefacts, whole or not at all; return the `run_id`.

        `tables` are Arrow tables by table name, with the columns of the schema less `run_id`. The
        run `instead_of`, whose contents are all in the new run, is removed in the same transaction.
        """
        unknown = tables.keys() - ARTEFACT_TABLES.keys()
        assert not unknown, f"not tables of the store: {unknown}"
        self._intruders.check()
        with self._limited():
            with transaction(self._connection):
                [(run_id,)] = self._connection.execute(
                    "SELECT coalesce(max(run_id), 0) + 1 FROM runs"
                ).fetchall()
                if instead_of is not None:
                    self._remove(instead_of)
                self._insert_run(run_id, run, tables)
                for name, table in tables.items():
                    self._insert_rows(name, run_id, table)
                self._intruders.check()
            self._unwritten = None
            # A copy of the file without its write-ahead log would silently lack this run.
            checkpoint(self._connection)
        self._intruders.accept()
        return run_id

    def runs(
        self,
        *,
        command: str | None = None,
        model_id: str | None = None,
        table: str | None = None,
    ) -> list[StoredRun]:
        """The complete runs, oldest first: all, or those of a command, of a model, or that wrote a
        table."""
        runs = [
            _stored_run(row, self.path) for row in self._rows(f"{_SELECT_RUNS} ORDER BY run_id")
        ]
        return [
            run
            for run in runs
            if command in (None, run.info.command)
            and model_id in (None, run.info.model_id)
            and (table is None or table in run.contents)
        ]

    def run(self, run_id: int) -> StoredRun:
        """The complete run with this number. Raises BadInput if there is none."""
        runs = {run.run_id: run for run in self.runs()}
        if run_id not in runs:
            run_ids = ", ".join(map(str, runs)) or "none"
            raise BadInput(f"{self.path} has no run {run_id}; it has {run_ids}")
        return runs[run_id]

    def latest_run(
        self, command: str | None = None, model_id: str | None = None, *, table: str | None = None
    ) -> StoredRun | None:
        """The newest of these `runs`; None if there is none."""
        runs = self.runs(command=command, model_id=model_id, table=table)
        return runs[-1] if runs else None

    def run_with(
        self,
        table: str,
        run_id: int | None,
        *,
        lacks: str,
        model_ids: Container[str | None] | None = None,
    ) -> StoredRun:
        """The run with this number, else the newest one (of one of the models, if given), that
        wrote a table. Raises Incompatible, which says what the store or the run `lacks`, when it
        did not."""
        candidates = self.runs() if run_id is None else [self.run(run_id)]
        for run in reversed(candidates):
            if table in run.contents and (model_ids is None or run.info.model_id in model_ids):
                return run
        where = self.path if run_id is None else f"run {run_id} of {self.path}"
        raise Incompatible(f"{where} holds no {lacks}")

    def read(self, table: str, run_id: int) -> pa.Table:
        """Return the rows that a run wrote to a table, in the order written, less `run_id`.

        Raises BadInput when the run did not write this table, or the file has lost rows of it.
        """
        assert table in ARTEFACT_TABLES, table
        size = self.run(run_id).contents.get(table)
        if size is None:
            raise BadInput(f"run {run_id} in {self.path} wrote no {table}")
        rows = self.query(
            f"SELECT * EXCLUDE (run_id) FROM {quoted(table)} WHERE run_id = {int(run_id)}"
        )
        if rows.num_rows != size.num_rows:
            raise BadInput(
                f"{self.path} is damaged: run {run_id} wrote {size.num_rows} rows of {table} and "
                f"{rows.num_rows} are left; was it copied without its .wal file? Restore it or "
                "run the command again"
            )
        return rows

    def query(self, select: str) -> pa.Table:
        """The rows of any query.

        Raises Incompatible when the file lacks a table or a column that this moectl expects.
        """
        try:
            with self._limited(select):
                return self._connection.sql(select).to_arrow_table(batch_size=1_000_000)
        except (duckdb.DataError, duckdb.InvalidInputException) as error:
            raise BadInput(
                f"{self.path} is damaged: it holds values that no moectl writes "
                f"({first_line(error)}); restore it from a copy or make it anew"
            ) from error
        except (duckdb.CatalogException, duckdb.BinderException) as error:
            if missing := lacking(self.columns()):
                raise Incompatible(
                    f"{self.path} lacks {missing}: it is damaged; restore it from a copy or make "
                    "it anew"
                ) from error
            raise

    def columns(self) -> dict[str, set[str]]:
        """Names of the columns that the file has, by table."""
        with self._limited():
            return stored_columns(self._connection)

    def sizes(self) -> dict[str, TableSize]:
        """Rows and bytes of all complete runs together, by table; tables without rows are left
        out."""
        written: dict[str, list[TableSize]] = {}
        for run in self.runs():
            for name, size in run.contents.items():
                written.setdefault(name, []).append(size)
        return {
            name: TableSize(
                sum(size.num_rows for size in written[name]),
                sum(size.nbytes for size in written[name]),
            )
            for name in ARTEFACT_TABLES
            if name in written
        }

    @contextmanager
    def _limited(self, query: str = "") -> Iterator[None]:
        """Check the tables that a query names before it runs, and limit it."""
        named = set(re.findall(r"\w+", query)) & TABLES.keys() - self._sized
        with limited(self._connection, self.path):
            for table in named & stored_columns(self._connection).keys() if named else ():
                check_size(self._connection, table, self.path)
            self._sized |= named
            yield

    def _rows(self, query: str) -> list[tuple]:
        with self._limited(query):
            return self._connection.execute(query).fetchall()

    def _insert_run(self, run_id: int, run: RunInfo, tables: Mapping[str, pa.Table]) -> None:
        contents = {
            name: {"num_rows": table.num_rows, "nbytes": table.nbytes}
            for name, table in tables.items()
        }
        row = {field.name: getattr(run, field.name) for field in fields(run)} | {
            "run_id": run_id,
            "status": "complete",
            "parameters": json.dumps(dict(run.parameters)),
            "versions": json.dumps(dict(run.versions)),
            "contents": json.dumps(contents),
        }
        places = ", ".join("?" * len(row))
        self._connection.execute(
            f"INSERT INTO runs ({', '.join(row)}) VALUES ({places})", list(row.values())
        )

    def _remove(self, run_id: int) -> None:
        for name in (*(self.run(run_id).contents.keys() & ARTEFACT_TABLES.keys()), "runs"):
            self._connection.execute(f"DELETE FROM {quoted(name)} WHERE run_id = {int(run_id)}")

    def _insert_rows(self, name: str, run_id: int, table: pa.Table) -> None:
        # When this fails the view needs no unregistering: it belongs to the transaction, which is
        # rolled back.
        self._connection.register("incoming", table)
        self._connection.execute(
            f"INSERT INTO {quoted(name)} BY NAME SELECT {int(run_id)} AS run_id, * FROM incoming"
        )
        self._connection.unregister("incoming")


def add_run(
    path: str | Path,
    run: RunInfo,
    tables: Mapping[str, pa.Table],
    *,
    model: ModelInfo | None = None,
) -> int:
    """Open a store, write one run and its model, and close it; return the `run_id`.

    Long commands end this way: they wait for a process that holds the store at that moment. Raises
    as `Store.open` does.
    """
    with Store.open(path, patience_s=PATIENCE_S) as store:
        if model:
            store.add_model(model)
        return store.write_run(run, tables)


def _stored_run(row: tuple, path: Path) -> StoredRun:
    run_id, contents, *texts, parameters, made_with = row
    try:
        parameters, made_with, contents = (
            dict(parse_json(text)) for text in (parameters, made_with, contents)
        )
        info = RunInfo(*texts, parameters=parameters, versions=made_with)
        sizes = {
            name: TableSize(int(size["num_rows"]), int(size["nbytes"]))
            for name, size in contents.items()
        }
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadInput(
            f"{path} is damaged: what it says of run {run_id} cannot be read; restore it"
        ) from error
    return StoredRun(run_id=run_id, info=info, contents=sizes)
