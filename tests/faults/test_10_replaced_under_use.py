"""Files that are cut off, replaced or moved away while something uses them."""

import shutil
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.shape import Shape
from artifacts.store.file import wal_of
from artifacts.store.store import Store, add_run
from runtime.model.checkpoint import Shard
from runtime.tiers.replicas import ReplicaStore
from tests.helpers.replica_files import NUM_INPUTS, written
from tests.helpers.stores import MODEL, activations, run_info, verified, write


@pytest.fixture
def in_use(tmp_path: Path) -> ReplicaStore:
    path = written(tmp_path / "expert.safetensors", seed=0)
    return ReplicaStore([path], bits=4, shape=Shape(1, 1, 1, 100), num_inputs={"down_proj": NUM_INPUTS})


def read(store: ReplicaStore) -> bytes:
    out = torch.zeros(store.layout.nbytes, dtype=torch.uint8)
    store.read(0, 0, out)
    return out.numpy().tobytes()


def test_a_replica_cut_off_is_told(in_use: ReplicaStore, tmp_path: Path) -> None:
    path = tmp_path / "expert.safetensors"
    before = read(in_use)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(BadInput, match=f"{path} changed while in use and is damaged: run moectl quantize again"):
        read(in_use)
    path.unlink()
    with pytest.raises(BadInput, match="cannot be read .No such file"):
        read(in_use)
    path.write_bytes(whole)
    assert read(in_use) == before


def test_a_replica_written_again_is_as_good_and_another_is_told(in_use: ReplicaStore, tmp_path: Path) -> None:
    path, before = tmp_path / "expert.safetensors", read(in_use)
    written(path, seed=0)
    assert read(in_use) == before
    written(path, seed=1)
    with pytest.raises(BadInput, match="was replaced while in use: start the run again"):
        read(in_use)


def test_a_shard_replaced_is_read_to_its_end_and_one_cut_off_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", seed=0)
    shard, whole = Shard(path), path.read_bytes()
    target = bytearray(len(whole))
    written(path, seed=1)
    shard.read_into(0, [memoryview(target)])
    assert target == whole, "the file that was opened, whatever its name stands for by now"
    shard = Shard(path)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(BadInput, match="ends before byte 100: it changed while in use"):
        shard.read_into(0, [memoryview(target)])


def test_a_store_moved_away_before_its_run_is_written_keeps_what_it_has(filled: Path) -> None:
    """The store is moved while a profile runs: the run is written to a new store of the old name."""
    away = shutil.move(filled, filled.with_name("away.duckdb"))
    assert add_run(filled, run_info(), {"activations": activations(10)}, model=MODEL) == 1
    assert verified(filled) == verified(away) == [1]


def test_a_store_moved_away_while_it_is_open_has_what_was_written(filled: Path) -> None:
    away = filled.with_name("away.duckdb")
    with Store.open(filled) as store:
        filled.rename(away)
        assert store.write_run(run_info(), {"activations": activations(10)}) == 2
    assert verified(away) == [1, 2]
    assert not filled.exists() and not wal_of(filled).exists()


def test_a_new_store_moved_away_is_not_removed(path: Path) -> None:
    """An empty store is removed when it is closed, but not another store that has taken its name."""
    with Store.open(path):
        path.rename(away := path.with_name("away.duckdb"))
        write(other := path.with_name("other.duckdb"))
        other.rename(path)
    assert verified(path) == [1] and away.exists()


def test_a_store_whose_folder_went_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(path := tmp_path / "folder" / "moe.duckdb")
    shutil.rmtree(path.parent)
    with pytest.raises(BadInput, match=f"there is no folder {path.parent} for the store moe.duckdb"):
        add_run(path, run_info(), {"activations": activations(10)})
