"""Stores with changed, missing or foreign bytes; logs and replicas of other stores."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import torch

from artifacts.errors import Problem
from artifacts.quantisation.gptq import round_to_nearest
from artifacts.quantisation.replica_file import (
    file_hash,
    replica_nbytes,
    replica_root,
    write_replicas,
)
from artifacts.shape import Shape
from artifacts.store.check import check_store
from artifacts.store.file import wal_of
from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from artifacts.store.schema import ARTEFACT_TABLES, SCHEMA_VERSION
from artifacts.store.store import Store, add_run
from tools.torments.cases import Lost
from tools.torments.content_hash import content_hash

_MODEL = ModelInfo(
    "toy", "a" * 64, "olmoe", Shape(num_layers=2, num_experts=3, top_k=2, expert_nbytes=100)
)
_NUM_ROWS = 3000
_FILLED = ("activations", "traces", "replicas")
_MAY_BE_EMPTY = "probabilities"  # without a log no reader can know of its runs
_BLOCK = 4096  # bytes of a header; DuckDB's data blocks begin after three headers


class DamagedStore:
    """A read returns what was written or raises a Problem of one line that names the file; a check
    reports whatever a read could meet; a write happens to a sound store or not at all."""

    classes = (5, 6, 7, 9)
    share = 3.0

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        self._whole = ground / "whole"
        self._folder = ground / "case"
        self._whole.mkdir()
        path = self._whole / "moe.duckdb"
        for seed in range(2):
            add_run(path, _run("profile"), _profile(seed), model=_MODEL)
        add_run(path, _run("quantize"), {"replicas": _replicas(path)}, model=_MODEL)
        self._logs = _logs(ground)
        self._content = _content(path)

    def one(self, rng: random.Random) -> str:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._whole, self._folder)
        path = self._folder / "moe.duckdb"
        damage = rng.choice(list(_DAMAGES))
        told = _DAMAGES[damage](rng, path, self._logs)
        if damage == "schema":
            return f"7: {self._lacking(path, told)}"
        said = self._read(path, told)
        if rng.random() < 0.3:
            self._write(path, told)
        return f"{told}, {said}"

    def _read(self, path: Path, told: str, *, num_more: int = 0) -> str:
        """Read as a command and as a check do; `num_more` runs were written since."""
        problem = ""
        try:
            found = _content(path)
            if any(found.get(run) != content for run, content in self._content.items()):
                raise Lost(
                    f"{told}: a run has other rows than it wrote, or is not there, and nobody "
                    "says so"
                )
            if len(found) != len(self._content) + num_more:
                raise Lost(f"{told}: {len(found)} runs are there")
        except Problem as error:
            problem = _one_line(error, path, told)
        findings = _findings(path, told)
        if problem and not findings:
            raise Lost(f"{told}: a check finds nothing, and a reader {problem}")
        if told.startswith("9") and not findings:
            raise Lost(f"{told}: a check finds nothing")
        return "refused" if problem else "told" if findings else "harmless"

    def _write(self, path: Path, told: str) -> None:
        try:
            with Store.open(path) as store:
                run_id = store.write_run(_run("learn"), _profile(7))
                wanted = content_hash(store, run_id)
            with Store.open(path, read_only=True) as store:
                if content_hash(store, run_id) != wanted:
                    raise Lost(f"{told}: what was written into it is not what is read")
        except Problem as error:
            _one_line(error, path, told)

    def _lacking(self, path: Path, told: str) -> str:
        """A store without some of its tables or columns, or of another schema: readers tell, and
        nothing is written into it."""
        before = path.read_bytes()
        with suppress(Problem):
            _content(path)
        try:
            add_run(path, _run("learn"), _profile(7), model=_MODEL)
        except Problem as error:
            _one_line(error, path, told)
            if path.read_bytes() != before:
                raise Lost(f"{told}: refused, and changed") from error
            return f"{told}, refused"
        return f"{told}, {self._read(path, told, num_more=1)}"


def _content(path: Path) -> dict[int, str]:
    with Store.open(path, read_only=True) as store:
        return {run.run_id: content_hash(store, run.run_id) for run in store.runs()}


def _findings(path: Path, told: str) -> bool:
    try:
        with Store.open(path, read_only=True) as store:
            return bool(check_store(store).findings)
    except Problem as error:
        _one_line(error, path, told)
        return True


def _one_line(error: Problem, path: Path, told: str) -> str:
    text = str(error)
    if "\n" in text or str(path) not in text:
        raise Lost(f"{told}: not one line that names the file: {text!r}") from error
    return text


def _flipped(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8))):
        at = rng.randrange(3 * _BLOCK) if rng.random() < 0.2 else rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"5: flipped {'in a header' if at < 3 * _BLOCK else 'in a block'}"


def _cut(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    content = path.read_bytes()
    size = (
        rng.randrange(len(content))
        if rng.random() < 0.5
        else _BLOCK * rng.randrange(len(content) // _BLOCK)
    )
    path.write_bytes(content[:size])
    return "5: cut off"


def _zeroed(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    content = bytearray(path.read_bytes())
    at = _BLOCK * rng.randrange(len(content) // _BLOCK)
    content[at : at + _BLOCK] = bytes(_BLOCK)
    path.write_bytes(content)
    return "5: zeros in the place of 4 KiB"


def _another_file(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    kind = rng.choice(("empty", "text", "sqlite", "noise", "a database"))
    path.unlink()
    if kind == "sqlite":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE t (x)")
        connection.close()
    elif kind == "a database":
        with duckdb.connect(str(path)) as connection:
            connection.execute("CREATE TABLE t (x INTEGER)")
    else:
        contents = {
            "empty": b"",
            "text": b"key,value\n1,2\n" * rng.randrange(1, 999),
            "noise": rng.randbytes(20_000),
        }
        path.write_bytes(contents[kind])
    return f"5: {kind}"


def _log(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    kind = rng.choice((*logs, "noise"))
    log = rng.randbytes(5000) if kind == "noise" else wal_of(logs[kind]).read_bytes()
    how = rng.choice(("whole", "cut off", "flipped"))
    if how == "cut off":
        log = log[: rng.randrange(len(log))]
    elif how == "flipped":
        at = rng.randrange(len(log))
        log = log[:at] + bytes([log[at] ^ 1 << rng.randrange(8)]) + log[at + 1 :]
    wal_of(path).write_bytes(log)
    return f"6: a log of {kind}, {how}"


def _replica(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    files = sorted(replica_root(path).rglob("*.safetensors"))
    one = rng.choice(files)
    content = b""
    how = rng.choice(("flipped", "cut off", "longer", "gone", "another's", "of nobody"))
    content = bytearray(one.read_bytes())
    if how == "flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "cut off":
        del content[rng.randrange(len(content)) :]
    elif how == "longer":
        content += b"\0"
    elif how == "another's":
        content = rng.choice([file for file in files if file != one]).read_bytes()
    one.with_name("other.safetensors" if how == "of nobody" else one.name).write_bytes(content)
    if how == "gone":
        one.unlink()
    return f"9: a replica {how}"


def _schema(rng: random.Random, path: Path, logs: dict[str, Path]) -> str:
    """Tables or columns that are gone, and perhaps another version."""
    version = rng.randrange(1, SCHEMA_VERSION + 1)
    with duckdb.connect(str(path)) as connection:
        for table in sorted(
            {rng.choice((*ARTEFACT_TABLES, *_FILLED * 4)) for _ in range(rng.randrange(4))}
        ):
            columns = connection.execute(f"SELECT column_name FROM (DESCRIBE {table})").fetchall()
            columns = [name for (name,) in columns if name not in ("run_id", _MAY_BE_EMPTY)]
            if rng.random() < 0.5:
                connection.execute(f"DROP TABLE {table}")
            else:
                connection.execute(f'ALTER TABLE {table} DROP COLUMN "{rng.choice(columns)}"')
        connection.execute("UPDATE schema_version SET version = ?", [version])
    return f"lacking, of schema {version}"


_DAMAGES: dict[str, Callable[[random.Random, Path, dict[str, Path]], str]] = {
    "flipped": _flipped,
    "cut": _cut,
    "zeroed": _zeroed,
    "another file": _another_file,
    "log": _log,
    "replica": _replica,
    "schema": _schema,
}


def _run(command: str) -> RunInfo:
    return RunInfo(command, _MODEL.model_id, utc_now(), 1.0, versions={})


def _profile(seed: int) -> dict[str, pa.Table]:
    random = np.random.default_rng(seed)
    layer, expert = np.divmod(np.arange(_NUM_ROWS), 256)
    lists = [pa.array(random.integers(0, 64, (_NUM_ROWS, 2)).tolist(), pa.list_(pa.uint16()))]
    lists += [
        pa.array(random.random((_NUM_ROWS, width)).tolist(), pa.list_(pa.float32()))
        for width in (2, 16)
    ]
    counts = {"count": random.integers(0, 2**50, _NUM_ROWS), "weight": random.random(_NUM_ROWS)}
    place = {
        "request": expert,
        "pass": layer,
        "phase": ["decode"] * _NUM_ROWS,
        "layer": layer,
        "token": expert,
    }
    return {
        "activations": pa.table(
            {"phase": ["prefill"] * _NUM_ROWS, "layer": layer, "expert": expert, **counts}
        ),
        "traces": pa.table(
            place | dict(zip(("experts", "weights", "probabilities"), lists, strict=True))
        ),
    }


def _replicas(path: Path) -> pa.Table:
    folder = replica_root(path) / "aaaa"
    folder.mkdir(parents=True)
    rows = []
    for key in range(_MODEL.shape.num_keys):
        layer, expert = divmod(key, _MODEL.shape.num_experts)
        file = folder / f"{key}.safetensors"
        weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(key))
        packed = {
            bits: {"down_proj": round_to_nearest(weight, bits, 32).packed()} for bits in (2, 4)
        }
        write_replicas(
            file, packed, {"model": _MODEL.fingerprint, "layer": str(layer), "expert": str(expert)}
        )
        own = {
            "layer": layer,
            "expert": expert,
            "file": f"aaaa/{file.name}",
            "hash": file_hash(file),
        }
        rows += [
            {**own, "bits": bits, "nbytes": nbytes} for bits, nbytes in replica_nbytes(file).items()
        ]
    return pa.Table.from_pylist(rows)


def _logs(ground: Path) -> dict[str, Path]:
    """Logs of other stores, which were never merged into their files."""
    path = ground / "other.duckdb"
    with Store.open(path) as store:
        store.write_run(_run("profile"), _profile(3))
    copy = ground / "copy.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT range AS x FROM range(1000)")
        shutil.copyfile(path, copy)
        shutil.copyfile(wal_of(path), wal_of(copy))
    return {"another store": copy}
