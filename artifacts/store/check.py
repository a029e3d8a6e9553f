"""What is wrong with a store: rows that are missing, files that changed, what a stopped command left beside it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.quantisation.replica_file import replica_nbytes, replica_root, verify
from artifacts.store.leftovers import StoreFinding, beside, unnamed
from artifacts.store.runs import StoredRun
from artifacts.store.schema import ARTEFACT_TABLES, SCHEMA_VERSION, columns
from artifacts.store.store import Store

_REFERENCE = "profile_run"  # the parameter in which a run says of which other it was made


@dataclass(frozen=True, slots=True)
class Checked:
    """How much was looked at, and what was found."""

    num_runs: int
    num_rows: int
    num_files: int
    findings: tuple[StoreFinding, ...]


def check_store(store: Store) -> Checked:
    """Read every row and every replica file, and compare them with what runs say they wrote.

    Raises BadInput and Incompatible only for a store of which not even the list of runs can be read.
    """
    runs = store.runs()
    schema, scan = list(_schema(store)), _Scan(store)
    files, replicas = _replicas(store, runs)
    found = [*schema, *scan.findings, *_counts(runs, scan), *_references(store, runs), *replicas]
    left = [*beside(store.path), *unnamed(replica_root(store.path), files)]
    num_rows = sum(count for counts in scan.counts.values() for count in counts.values())
    return Checked(len(runs), num_rows, len(files), (*found, *left))


class _Scan:
    """Rows by table and run. All columns are read: a damaged block is noticed when something reads it."""

    def __init__(self, store: Store) -> None:
        self.counts: dict[str, dict[int, int]] = {table: {} for table in ARTEFACT_TABLES}
        self.findings: list[StoreFinding] = []
        for table in store.columns().keys() & ARTEFACT_TABLES.keys():
            try:
                rows = store.query(f"SELECT run_id, count(*) AS n, bit_xor(hash({table})) FROM {table} GROUP BY run_id")
                self.counts[table] = dict(zip(rows["run_id"].to_pylist(), rows["n"].to_pylist(), strict=True))
            except BadInput as problem:
                del self.counts[table]
                self.findings.append(StoreFinding(table, str(problem), "restore the store from a copy or make it anew"))


def _schema(store: Store) -> Iterator[StoreFinding]:
    """An older store lacks what came later: that is no fault of it."""
    [version] = store.query("SELECT max(version) AS version FROM schema_version")["version"].to_pylist()
    have = store.columns()
    for table, own in columns().items() if version == SCHEMA_VERSION else ():
        if missing := own.keys() - have.get(table, set()):
            yield StoreFinding(
                table,
                f"schema {version} has {', '.join(sorted(missing))}, which this store lacks",
                "the next command that writes adds it, after a copy",
            )


def _counts(runs: list[StoredRun], scan: _Scan) -> Iterator[StoreFinding]:
    for run in runs:
        for table, size in run.contents.items():
            found = scan.counts[table].get(run.run_id, 0) if table in scan.counts else size.num_rows
            if found != size.num_rows:
                yield StoreFinding(
                    f"run {run.run_id}",
                    f"it wrote {size.num_rows} rows of {table} and {found} are there",
                    f"restore the store from a copy or run moectl {run.info.command} again",
                )
    known = {run.run_id for run in runs}
    for table, counts in scan.counts.items():
        for run_id in sorted(counts.keys() - known):
            yield StoreFinding(
                table, f"{counts[run_id]} rows are of run {run_id}, which is not there", "nothing reads them"
            )


def _references(store: Store, runs: list[StoredRun]) -> Iterator[StoreFinding]:
    models, known = {model.model_id for model in store.models()}, {run.run_id for run in runs}
    for run in runs:
        again = f"run moectl {run.info.command} again"
        if run.info.model_id is not None and run.info.model_id not in models:
            yield StoreFinding(f"run {run.run_id}", f"its model {run.info.model_id} is not in the store", again)
        if (other := run.info.parameters.get(_REFERENCE)) is not None and other not in known:
            yield StoreFinding(f"run {run.run_id}", f"it was made of run {other}, which is not there", again)
    unfinished = store.query("SELECT run_id, status FROM runs WHERE status <> 'complete'")
    for run_id, status in zip(*(unfinished[name].to_pylist() for name in ("run_id", "status")), strict=True):
        yield StoreFinding(f"run {run_id}", f"its status is {status}", "nothing reads it: run its command again")


def _replicas(store: Store, runs: list[StoredRun]) -> tuple[set[Path], list[StoreFinding]]:
    """The files that runs name, and what is wrong with them, a line for each run and kind."""
    root, named, findings = replica_root(store.path), set(), []
    for run in (run for run in runs if "replicas" in run.contents):
        files = _files(store, run)
        named |= {root / file for file in files}
        wrong = defaultdict(list)
        for file, (hash, nbytes) in files.items():
            if why := _wrong(root, file, hash, nbytes):
                wrong[why].append(file)
        findings += [
            StoreFinding(
                f"run {run.run_id}",
                f"{len(bad)} of {len(files)} replica files {why}, {'as' if len(bad) > 1 else 'namely'} {bad[0]}",
                f"put the folder {root.name} as it was beside the store, or run moectl quantize again",
            )
            for why, bad in wrong.items()
        ]
    return named, findings


def _files(store: Store, run: StoredRun) -> dict[str, tuple[str, dict[int, int]]]:
    """By file its hash and the bytes of its widths."""
    try:
        rows = store.read("replicas", run.run_id).to_pylist()
    except BadInput:  # told by its count, or its table
        return {}
    found: dict[str, tuple[str, dict[int, int]]] = {}
    for row in rows:
        found.setdefault(row["file"], (row["hash"], {}))[1][row["bits"]] = row["nbytes"]
    return found


def _wrong(root: Path, file: str, hash: str, nbytes: dict[int, int]) -> str:
    path = root / file
    if not path.resolve().is_relative_to(root.resolve()):
        return "lie outside their folder"
    if not path.is_file():
        return "are missing"
    try:
        if replica_nbytes(path) != nbytes:
            return "have another size than was written"
        verify(path, hash)
    except BadInput:
        return "are not what was written (damaged or replaced)"
    return ""
