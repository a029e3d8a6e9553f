"""Files that are cut off, replaced, written into or moved away while something uses them, or that
cannot be written."""

import shutil
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from artifacts.shape import Shape
from artifacts.store.file import wal_of
from artifacts.store.store import Store, add_run
from moectl.commands.start.run import keeping_maps
from runtime.model.files.checkpoint import Shard, open_checkpoint
from runtime.model.files.pack import pack
from runtime.model.open import open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from runtime.tiers.ram import RamStore
from runtime.tiers.replica_store import ReplicaStore
from tests.faults.models import UP, Copy
from tests.helpers.read_only import read_only
from tests.helpers.replica_files import NUM_INPUTS, written
from tests.helpers.rewritten import invert, rewritten
from tests.helpers.stores import MODEL, activations, run_info, verified, write


@pytest.fixture
def in_use(tmp_path: Path) -> ReplicaStore:
    path = written(tmp_path / "expert.safetensors", seed=0)
    return ReplicaStore(
        [path], bits=4, shape=Shape(1, 1, 1, 100), num_inputs={"down_proj": NUM_INPUTS}, model="m"
    )


def read(store: ReplicaStore) -> bytes:
    out = torch.zeros(store.layout.nbytes, dtype=torch.uint8)
    store.read(0, 0, out)
    return out.numpy().tobytes()


def test_a_replica_cut_off_is_told(in_use: ReplicaStore, tmp_path: Path) -> None:
    path = tmp_path / "expert.safetensors"
    before = read(in_use)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(
        BadInput, match=f"{path} changed while in use and is damaged: run moectl quantize again"
    ):
        read(in_use)
    path.unlink()
    with pytest.raises(BadInput, match="cannot be read .No such file"):
        read(in_use)
    path.write_bytes(whole)
    assert read(in_use) == before


def test_a_replica_written_again_is_as_good_and_another_is_told(
    in_use: ReplicaStore, tmp_path: Path
) -> None:
    path = tmp_path / "expert.safetensors"
    before = read(in_use)
    written(path, seed=0)
    assert read(in_use) == before
    written(path, seed=1)
    with pytest.raises(BadInput, match="was replaced while in use: start the run again"):
        read(in_use)


def test_a_shard_replaced_is_read_to_its_end_and_one_cut_off_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", seed=0)
    shard = Shard(path)
    whole = path.read_bytes()
    target = bytearray(len(whole))
    written(path, seed=1)
    shard.read_into(0, [memoryview(target)])
    assert target == whole, "the file that was opened, whatever its name stands for by now"
    shard = Shard(path)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(BadInput, match="ends before byte 100: it changed while in use"):
        shard.read_into(0, [memoryview(target)])


# Checkpoints

CHANGED = (
    r"model\.safetensors changed while it is in use: what was read is of two models, start again"
)


def words(session: Session) -> list[int]:
    tokens = session.tokens(
        torch.tensor([[5, 6, 7, 8]]), Sampling(max_new_tokens=4, ignore_eos=True)
    )
    return [token.token_id for token in tokens]


def session_of(folder: Path, link: str) -> Session:
    return Session(open_model(str(folder)), Settings(budget="25%", link=link, window="0B"))


def test_a_checkpoint_written_into_ends_the_request_before_its_next_token(copy: Copy) -> None:
    with session_of(folder := copy("olmoe"), "disk") as session:
        assert len(words(session)) == 4
        invert(folder, UP)
        got = session.tokens(torch.tensor([[5, 6, 7, 8]]), Sampling(max_new_tokens=4))
        with pytest.raises(BadInput, match=CHANGED):
            next(got)
        with pytest.raises(BadInput, match=CHANGED):
            words(session)


def test_a_checkpoint_replaced_by_another_file_is_read_to_the_end(copy: Copy) -> None:
    with session_of(folder := copy("olmoe"), "disk") as session:
        before = words(session)
        path = folder / "model.safetensors"
        invert(Path(shutil.copytree(folder, other := folder.with_name("other"))), UP)
        (other / path.name).rename(path)
        assert words(session) == before
        assert open_model(str(folder)).fingerprint != session.opened.fingerprint
        with pytest.raises(
            BadInput, match="was replaced since it was opened: start again|past the page cache"
        ):
            session.opened.store.direct()


def test_experts_in_ram_are_of_one_checkpoint(copy: Copy) -> None:
    with session_of(folder := copy("olmoe"), "100GB/s") as session:
        before = words(session)
        with rewritten(folder, UP):
            assert words(session) == before
    store = open_model(str(folder)).store
    with pytest.raises(BadInput, match=CHANGED):
        RamStore(store, progress=lambda done: invert(folder, UP) if done == 3 else None)


def test_a_checkpoint_written_into_while_it_is_packed_leaves_no_folder(
    copy: Copy, tmp_path: Path
) -> None:
    opened = open_model(str(folder := copy("olmoe")))
    out = tmp_path / "packed"
    with pytest.raises(BadInput, match="was replaced since it was opened"), rewritten(folder, UP):
        pack(opened, open_checkpoint(folder), out)
    with pytest.raises(BadInput, match=CHANGED):
        pack(
            opened,
            open_checkpoint(folder),
            out,
            progress=lambda done, total: invert(folder, UP) if done == 1 else None,
        )
    assert not out.exists()
    invert(folder, UP)
    pack(open_model(str(folder)), open_checkpoint(folder), out)
    assert open_model(str(out)).fingerprint == opened.fingerprint


def test_a_checkpoint_written_into_leaves_no_learned_maps(copy: Copy, path: Path) -> None:
    settings = Settings("fmoe", budget="50%", link="disk", window="1B", learn=True)
    with (
        Session(open_model(str(folder := copy("olmoe"))), settings) as session,
        pytest.raises(BadInput, match=CHANGED),
        keeping_maps(session, "model", store=path),
    ):
        assert len(words(session)) == 4
        invert(folder, UP)
        words(session)
    assert not path.exists()


def test_a_checkpoints_folder_may_be_read_only(copy: Copy, tmp_path: Path) -> None:
    folder = copy("olmoe")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    with read_only(folder):
        with pytest.raises(PermissionError):
            (folder / "x").touch()
        with session_of(folder, "disk") as session:
            assert len(words(session)) == 4
        pack(session.opened, open_checkpoint(folder), tmp_path / "packed")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# Stores


def test_a_store_moved_away_before_its_run_is_written_keeps_what_it_has(filled: Path) -> None:
    """The store is moved while a profile runs: the run is written to a new store of the old
    name."""
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
    """An empty store is removed when it is closed, but not another store that has taken its
    name."""
    with Store.open(path):
        path.rename(away := path.with_name("away.duckdb"))
        write(other := path.with_name("other.duckdb"))
        other.rename(path)
    assert verified(path) == [1] and away.exists()


def test_a_store_whose_folder_went_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(path := tmp_path / "folder" / "moe.duckdb")
    shutil.rmtree(path.parent)
    with pytest.raises(
        BadInput, match=f"there is no folder {path.parent} for the store moe.duckdb"
    ):
        add_run(path, run_info(), {"activations": activations(10)})
