"""Check a store: missing rows, changed replica files, and files that a stopped command left beside
it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadInput
from artifacts.quantisation.replica_file import replica_nbytes, replica_root, verify
from artifacts.store.leftovers import StoreFinding, beside, unnamed
from artifacts.store.runs import StoredRun
from artifacts.store.schema import ARTEFACT_TABLES, TABLES, quoted
from artifacts.store.store import Store

_REFERENCE = "profile_run"  # the parameter that names the run from which another was made


@dataclass(frozen=True, slots=True)
class Checked:
    """Numbers of runs, rows and files that were checked, and the findings."""

    num_runs: int
    num_rows: int
    num_files: int
    findings: tuple[StoreFinding, ...]


def check_store(store: Store) -> Checked:
    """Read every row and every replica file, and compare them with what the runs recorded.

    Raises BadInput and Incompatible only for a store whose list of runs cannot be read.
    """
    runs = store.runs()
    schema = list(_schema(store))
    scan = _Scan(store)
    files, replicas = _replicas(store, runs)
    damage = [*schema, *scan.findings, *_counts(runs, scan), *_references(store, runs), *replicas]
    leftovers = [*beside(store.path), *unnamed(replica_root(store.path), files)]
    num_rows = sum(count for counts in scan.counts.values() for count in counts.values())
    return Checked(len(runs), num_rows, len(files), (*damage, *leftovers))


class _Scan:
    """Counts of rows by table and run. All columns are read, since a damaged block is detected only
    when it is read."""

    def __init__(self, store: Store) -> None:
        self.counts: dict[str, dict[int, int]] = {table: {} for table in ARTEFACT_TABLES}
        self.findings: list[StoreFinding] = []
        for table in store.columns().keys() & ARTEFACT_TABLES.keys():
            try:
                counted = (
                    f"SELECT run_id, count(*) AS n, bit_xor(hash({quoted(table)})) FROM "
                    f"{quoted(table)}"
                )
                rows = store.query(f"{counted} GROUP BY run_id")
                self.counts[table] = dict(
                    zip(rows["run_id"].to_pylist(), rows["n"].to_pylist(), strict=True)
                )
            except BadInput as problem:
                del self.counts[table]
                self.findings.append(
                    StoreFinding(
                        table, str(problem), "restore the store from a copy or make it anew"
                    )
                )


def _schema(store: Store) -> Iterator[StoreFinding]:
    present = store.columns()
    for table, expected in TABLES.items():
        if missing := expected.columns.keys() - present.get(table, set()):
            yield StoreFinding(
                table,
                f"the store lacks {', '.join(sorted(missing))}",
                "restore the store from a copy or make it anew",
            )


def _counts(runs: list[StoredRun], scan: _Scan) -> Iterator[StoreFinding]:
    for run in runs:
        for table, size in run.contents.items():
            num_present = (
                scan.counts[table].get(run.run_id, 0) if table in scan.counts else size.num_rows
            )
            if num_present != size.num_rows:
                yield StoreFinding(
                    f"run {run.run_id}",
                    f"it wrote {size.num_rows} rows of {table} and {num_present} are there",
                    f"restore the store from a copy or run moectl {run.info.command} again",
                )
    run_ids = {run.run_id for run in runs}
    for table, counts in scan.counts.items():
        for run_id in sorted(counts.keys() - run_ids):
            yield StoreFinding(
                table,
                f"{counts[run_id]} rows are of run {run_id}, which is not there",
                "nothing reads them",
            )


def _references(store: Store, runs: list[StoredRun]) -> Iterator[StoreFinding]:
    models = {model.model_id for model in store.models()}
    run_ids = {run.run_id for run in runs}
    for run in runs:
        again = f"run moectl {run.info.command} again"
        if run.info.model_id is not None and run.info.model_id not in models:
            yield StoreFinding(
                f"run {run.run_id}", f"its model {run.info.model_id} is not in the store", again
            )
        if (other := run.info.parameters.get(_REFERENCE)) is not None and other not in run_ids:
            yield StoreFinding(
                f"run {run.run_id}", f"it was made of run {other}, which is not there", again
            )
    unfinished = store.query("SELECT run_id, status FROM runs WHERE status <> 'complete'")
    for row in unfinished.to_pylist():
        yield StoreFinding(
            f"run {row['run_id']}",
            f"its status is {row['status']}",
            "nothing reads it: run its command again",
        )


def _replicas(store: Store, runs: list[StoredRun]) -> tuple[set[Path], list[StoreFinding]]:
    """The files that runs name, and a finding for each run and kind of damage."""
    root = replica_root(store.path)
    named = set()
    findings = []
    for run in (run for run in runs if "replicas" in run.contents):
        files = _files(store, run)
        named |= {root / file for file in files}
        files_by_damage = defaultdict(list)
        for file, (hash, nbytes) in files.items():
            if damage := _damage_of(root, file, hash, nbytes):
                files_by_damage[damage].append(file)
        findings += [
            StoreFinding(
                f"run {run.run_id}",
                (
                    f"{len(bad)} of {len(files)} replica files {damage}, "
                    f"{'as' if len(bad) > 1 else 'namely'} {bad[0]}"
                ),
                (
                    f"put the folder {root.name} as it was beside the store, or run moectl "
                    "quantize again"
                ),
            )
            for damage, bad in files_by_damage.items()
        ]
    return named, findings


def _files(store: Store, run: StoredRun) -> dict[str, tuple[str, dict[int, int]]]:
    """Return the hash of each replica file of a run and the bytes of its widths, by file."""
    try:
        rows = store.read("replicas", run.run_id).to_pylist()
    except BadInput:  # already reported by the row counts or the scan
        return {}
    files: dict[str, tuple[str, dict[int, int]]] = {}
    for row in rows:
        files.setdefault(row["file"], (row["hash"], {}))[1][row["bits"]] = row["nbytes"]
    return files


def _damage_of(root: Path, file: str, hash: str, nbytes: dict[int, int]) -> str:
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
