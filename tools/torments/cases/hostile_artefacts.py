"""Untrusted artefacts: replica files, the manifest and other rows of a store, and traces in
Parquet."""

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from artifacts.hardware.machines import MACHINES
from artifacts.modelshapes.known import unsized
from artifacts.quantisation.replica_file import (
    file_hash,
    is_intact,
    read_replica,
    replica_nbytes,
    replica_root,
    verify,
)
from artifacts.store.check import check_store
from artifacts.store.hardware_profiles import stored_profile
from artifacts.store.presets import stored_presets
from artifacts.store.store import Store
from artifacts.traces.parquet import from_table, read_parquet, to_table
from runtime.model.layout import aligned
from runtime.policies import build
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.artefacts import load_artefacts, load_similarity
from runtime.session.presets import as_preset
from runtime.tiers.replica_store import ReplicaStore
from tests.helpers import artefacts
from tests.helpers.safetensors import Tensors, joined, parsed
from tools.torments.cases import Lost
from tools.torments.hostile import (
    FRACTIONS,
    NUMBERS,
    TEXTS,
    Hostile,
    altered,
    as_text,
    damaged,
    refusal,
    write,
)

_SHAPE = artefacts.SHAPE
_MOST_ROWS = 2_000  # of a trace that is replayed too
_KINDS = (
    pa.int8(),
    pa.int64(),
    pa.uint16(),
    pa.float16(),
    pa.float64(),
    pa.string(),
    pa.bool_(),
    pa.binary(),
)


class HostileArtefacts(Hostile):
    """Damage or alter one artefact; read it, and use it if reading succeeds."""

    classes = (9, 21)

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        self._ground = ground
        self._store = artefacts.fill(ground / "whole.duckdb")
        self._files = sorted((replica_root(self._store) / "run").iterdir())
        self._replica = self._files[0].read_bytes()
        self._trace = to_table(artefacts.trace())
        self._columns = _columns(self._store)
        self._kinds = {
            "9: a byte of a replica flipped": (4, self._flipped),
            "9: a replica file damaged": (6, self._damaged),
            "9: header of a replica altered": (6, self._altered),
            "21: rows of the store altered": (6, self._rows),
            "21: a path in the manifest": (1, self._path),
            "21: columns of a trace altered": (4, self._trace_altered),
            "21: a Parquet file damaged": (3, self._parquet),
        }

    def _flipped(self, rng: random.Random) -> None:
        at = rng.randrange(len(self._replica))
        flipped = self._replica[at] ^ 1 << rng.randrange(8)
        path = write(
            self._ground / "r.safetensors",
            self._replica[:at] + bytes([flipped]) + self._replica[at + 1 :],
        )
        whole = file_hash(self._files[0])
        if not refusal("9: a flipped byte", lambda: verify(path, whole)):
            raise Lost(f"9: byte {at} of a replica was flipped, and its hash was right")
        intact = []
        told = refusal("9: a flipped byte", lambda: intact.append(is_intact(path)))
        if not told and intact[0]:
            raise Lost(f"9: byte {at} of a replica was flipped, and its digest was right")

    def _damaged(self, rng: random.Random) -> None:
        self._is_read(write(self._ground / "r.safetensors", damaged(self._replica, rng)), rng)

    def _altered(self, rng: random.Random) -> None:
        tensors = parsed(self._replica)
        tensors = Tensors(altered(tensors.header, rng), tensors.data)
        self._is_read(
            write(self._ground / "r.safetensors", joined(tensors, as_text(tensors.header, rng))),
            rng,
        )

    def _is_read(self, path: Path, rng: random.Random) -> None:
        bits = rng.choice((1, 2, 3, 4))
        refusal("9: a damaged replica", lambda: read_replica(path, bits))
        refusal("9: a damaged replica", lambda: is_intact(path))
        refusal("9: a damaged replica", lambda: replica_nbytes(path))
        refusal(
            "9: a damaged replica among others",
            lambda: _read_beside([*self._files[:-1], path], bits),
        )

    def _rows(self, rng: random.Random) -> None:
        """Set values that a table's types allow; remove or duplicate rows."""
        path = self._copied()
        changed = []
        with duckdb.connect(path) as connection:
            for _ in range(rng.choice((1, 1, 2))):
                changed.append(_changed(connection, *rng.choice(self._columns), rng))
        refusal(f"21: {'; '.join(changed)}", lambda: _everything(path))

    def _path(self, rng: random.Random) -> None:
        path = self._copied()
        replica_root(path).mkdir(exist_ok=True)
        outside = self._ground / "whole.duckdb.replicas" / "run" / "0.safetensors"
        name = rng.choice(
            (
                str(outside),
                f"../{outside.relative_to(self._ground)}",
                "..",
                "",
                ".",
                "a/../../b",
                "/",
                "a\\0",
            )
        )
        with duckdb.connect(path) as connection:
            connection.execute(
                "UPDATE replicas SET file = ? WHERE layer = 0 AND expert = ?",
                [name, rng.randrange(4)],
            )

        def loaded() -> None:
            with Store.open(path, read_only=True) as store:
                found = load_artefacts(store, artefacts.MODEL.model_id, _SHAPE).replicas
            strange = [
                one
                for one in found.files
                if replica_root(path).resolve() not in one.resolve().parents
            ]
            if strange:
                raise Lost(f"21: the manifest leads to {strange[0]}, outside its folder")

        refusal(f"21: the manifest says {name!r}", loaded)

    def _copied(self) -> Path:
        path = self._ground / "case.duckdb"
        path.with_name("case.duckdb.wal").unlink(missing_ok=True)
        return Path(shutil.copyfile(self._store, path))

    def _trace_altered(self, rng: random.Random) -> None:
        table = self._trace
        for _ in range(rng.choice((1, 1, 2, 3))):
            table = _with_a_strange_column(table, rng)
        if rng.random() < 0.7:
            refusal(
                "21: an altered trace",
                lambda: _replayed(lambda known: from_table(table, num_experts=known), rng),
            )
            return
        path = self._ground / "trace.parquet"
        pq.write_table(table, path)
        refusal(
            "21: an altered trace",
            lambda: _replayed(lambda known: read_parquet(path, num_experts=known), rng),
        )

    def _parquet(self, rng: random.Random) -> None:
        path = self._ground / "trace.parquet"
        pq.write_table(self._trace, path, compression=rng.choice(("none", "zstd", "snappy")))
        whole = path.read_bytes()
        # a Parquet file has its metadata at the end
        at = rng.choice((0, len(whole) // 2, max(0, len(whole) - 3000)))
        write(path, whole[:at] + damaged(whole[at:], rng))
        refusal(
            "21: a damaged Parquet file",
            lambda: _replayed(lambda known: read_parquet(path, num_experts=known), rng),
        )


def _columns(store: Path) -> list[tuple[str, str, str]]:
    """Table, column and type of everything in a store."""
    with duckdb.connect(store) as connection:
        rows = connection.execute(
            "SELECT table_name, column_name, data_type FROM duckdb_columns()"
        ).fetchall()
        full = [
            name
            for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()
            if connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
        ]
    return [row for row in sorted(rows) if row[0] in full and row[1] != "run_id"]


def _changed(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, kind: str, rng: random.Random
) -> str:
    """Alter a table; DuckDB refuses what its types and constraints forbid."""
    some = f"(hash(rowid) % {rng.choice((1, 2, 5))}) = 0"
    value, said = _strange_value(connection, table, column, kind, rng)
    statement, values = rng.choice(
        (
            (f'UPDATE {table} SET "{column}" = ? WHERE {some}', [value]),
            (f'UPDATE {table} SET "{column}" = ? WHERE {some}', [value]),
            (f'UPDATE {table} SET "{column}" = ? WHERE {some}', [value]),
            (f"DELETE FROM {table} WHERE {some}", []),
            (f"INSERT INTO {table} SELECT * FROM {table} WHERE {some}", []),
        )
    )
    with suppress(duckdb.Error):
        connection.execute(statement, values)
    return f"{statement} [{said if values else ''}]"


def _strange_value(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, kind: str, rng: random.Random
) -> tuple[object, str]:
    if kind.endswith("]"):
        length = rng.choice((0, 1, 3, 4, 101))
        value: object = [rng.choice((0.0, 1.0, 3.0, *FRACTIONS[:2])) for _ in range(length)]
    elif kind == "VARCHAR":
        own = connection.execute(f'SELECT "{column}" FROM {table} LIMIT 1').fetchone()
        is_json = own and own[0] and own[0].startswith("{")
        value = as_text(altered(json.loads(own[0]), rng), rng) if is_json else rng.choice(TEXTS)
        value = value.replace("\ud800", "?")
    else:
        value = rng.choice((*NUMBERS, *FRACTIONS, None))
    return value, repr(value)[:80]


def _everything(path: Path) -> None:
    """Read everything that a run or a report reads."""
    with Store.open(path, read_only=True) as store:
        for model in store.models():
            load_artefacts(store, model.model_id, model.shape)
            load_similarity(store, model.model_id, model.shape)
            stored_profile(store, model.model_id)
        check_store(store)
        for kept in stored_presets(store):
            build(as_preset(kept).texts())
        for run in store.runs():
            if "traces" in run.contents:
                from_table(store.read("traces", run.run_id), num_experts=_SHAPE.num_experts)


def _read_beside(files: list[Path], bits: int) -> None:
    fingerprint = artefacts.MODEL.fingerprint
    store = ReplicaStore(
        files, bits=bits, shape=_SHAPE, num_inputs=artefacts.NUM_INPUTS, model=fingerprint
    )
    buffer = aligned(store.layout.nbytes)
    for key in range(_SHAPE.num_keys):
        store.read(*divmod(key, _SHAPE.num_experts), buffer)
        store.layout.views(buffer)


def _with_a_strange_column(table: pa.Table, rng: random.Random) -> pa.Table:
    at = rng.randrange(table.num_columns)
    name = table.column_names[at]
    column = table.column(at).combine_chunks()
    how = rng.random()
    if how < 0.1 and table.num_columns > 1:
        return table.remove_column(at)
    if how < 0.2:
        return table.rename_columns(
            [*table.column_names[:at], f"{name}x", *table.column_names[at + 1 :]]
        )
    if how < 0.25:
        start = rng.randrange(table.num_rows + 1)
        return pa.concat_tables([table.slice(start, rng.randrange(6)), table.slice(0, start)])
    if how < 0.3:
        return table.replace_schema_metadata(
            {b"moectl.predicted_layers": rng.choice(TEXTS).encode("utf-8", "replace")}
        )
    if how < 0.4:
        other = table.column(rng.randrange(table.num_columns))
        return table.set_column(at, name, other)
    values = column.to_pylist()
    for _ in range(rng.choice((1, 2, len(values)))):
        if values:
            _spoil(values, rng.randrange(len(values)), rng)
    for kind in (column.type, None, pa.list_(rng.choice(_KINDS)), rng.choice(_KINDS)):
        try:
            return table.set_column(at, name, pa.array(values, kind))
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            continue
    return table


def _spoil(values: list, row: int, rng: random.Random) -> None:
    value = rng.choice((*NUMBERS, *FRACTIONS, None, "x"))
    if not isinstance(values[row], list) or rng.random() < 0.2:
        values[row] = value if rng.random() < 0.8 else [value]
    elif values[row] and rng.random() < 0.8:
        values[row] = [*values[row]]
        values[row][rng.randrange(len(values[row]))] = value
    else:
        values[row] = values[row] * rng.choice((0, 2, 3))


def _replayed(read: Callable[[int | None], object], rng: random.Random) -> None:
    """Read a trace, and replay it if possible."""
    trace = read(rng.choice((_SHAPE.num_experts, _SHAPE.num_experts, 2, None)))
    if len(trace) > _MOST_ROWS:
        return
    num_experts = (
        trace.probabilities.shape[1] if trace.probabilities is not None else _SHAPE.num_experts
    )
    workload = Workload(
        trace, unsized(trace.num_layers, num_experts, trace.top_k), next(iter(MACHINES.values()))
    )
    eviction, prefetch = rng.choice((("lru", "none"), ("lfu", "next_gate"), ("belady", "oracle")))
    workload.run(
        Setting("case", policies={"eviction": eviction, "prefetch": prefetch}, budget="50%")
    )


np.seterr(all="ignore")
