"""A byte of a replica that is not what was written.

What is not hashed is loaded: `run --verify` and `inspect replicas --verify` say so, and the receipt
says which it was. Damage of the file's form: tests/artifacts/quantisation/test_replica_file.py, and
the torment `hostile_artefacts`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.errors import BadInput, Incompatible
from artifacts.quantisation.replica_file import file_hash, is_intact, read_replica, verify
from runtime.model.open import MoeModel, open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session, Settings
from runtime.tiers.replica_store import ReplicaStore, open_replicas
from tests.conftest import Checkpoint
from tests.helpers import artefacts
from tests.helpers.safetensors import Tensors, joined, parsed
from tools.gpu.checks.made_replicas import made

SETTINGS = Settings(policies={"miss": "fetch_lowest"}, link="disk", window="0B")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    return artefacts.write_replica(tmp_path / "0.safetensors", 0)


def test_every_byte_counts(replica: Path) -> None:
    hash = file_hash(replica)
    whole = replica.read_bytes()
    for at in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 397):
        flip(replica, at)
        assert not is_intact(replica), at
        with pytest.raises(BadInput, match="damaged or replaced"):
            verify(replica, hash)
        replica.write_bytes(whole)
    verify(replica, hash)
    assert is_intact(replica)


@pytest.fixture
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.mark.parametrize("is_verified", [False, True])
def test_the_receipt_says_whether_bytes_were_looked_at(
    opened: MoeModel, tmp_path: Path, is_verified: bool
) -> None:
    stored = made(opened, tmp_path)
    stored = replace(stored, hashes=tuple(map(file_hash, stored.files)))
    settings = replace(SETTINGS, verify=is_verified)
    with Session(opened, settings, artefacts=Artefacts(replicas=stored)) as session:
        assert session.receipt()["replicas"]["verified"] is is_verified
    flip(stored.files[3], -1)
    if not is_verified:
        Session(opened, settings, artefacts=Artefacts(replicas=stored)).close()
        return
    with pytest.raises(BadInput, match=rf"{stored.files[3]} is not what moectl quantize wrote"):
        Session(opened, settings, artefacts=Artefacts(replicas=stored))


Change = Callable[[dict], object]
HEADERS: dict[str, Change] = {
    "sizes without bytes": lambda header: header["4.down_proj.scales"].update(shape=[2**32, 2**32]),
    "no number": lambda header: header["4.down_proj.scales"].update(shape=[float("inf"), 1]),
    "negative": lambda header: header["4.down_proj.scales"].update(shape=[-1, -64]),
    "texts that are none": lambda header: header.update(__metadata__=[]),
    "a text that is none": lambda header: header["__metadata__"].update(
        {"down_proj.group_size": 0.5}
    ),
    "groups of none": lambda header: header["__metadata__"].update({"down_proj.group_size": "0"}),
    "endless groups": lambda header: header["__metadata__"].update(
        {"down_proj.group_size": "9" * 5000}
    ),
    "no widths": lambda header: header["__metadata__"].pop("bits"),
    "another width": lambda header: header.update({"x": header.pop("4.down_proj.scales")}),
    "no offsets": lambda header: header["4.down_proj.scales"].pop("data_offsets"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_describe_no_replica(replica: Path, name: str) -> None:
    tensors = parsed(replica.read_bytes())
    HEADERS[name](tensors.header)
    replica.write_bytes(joined(tensors))
    with pytest.raises(BadInput, match="damaged or no replica file"):
        read_replica(replica, 4)


def test_a_header_nested_without_end(replica: Path) -> None:
    tensors = parsed(replica.read_bytes())
    replica.write_bytes(joined(tensors, "[" * 100_000))
    with pytest.raises(BadInput, match="its header cannot be read"):
        read_replica(replica, 4)


def test_files_of_another_shape_reach_no_kernel(tmp_path: Path) -> None:
    """Valid safetensors of equal shapes, but the codes have fewer inputs than the model."""
    files = [artefacts.write_replica(tmp_path / f"{key}.safetensors", key) for key in range(8)]
    for path in files:
        parts = parsed(path.read_bytes()).taken_apart()
        kind, (rows, width), data = parts["4.down_proj.qweight"]
        parts["4.down_proj.qweight"] = (kind, [rows // 2, width], data[: len(data) // 2])
        path.write_bytes(joined(Tensors.together(parts)))
    with pytest.raises(Incompatible, match="a replica of another shape"):
        ReplicaStore(
            files,
            bits=4,
            shape=artefacts.SHAPE,
            num_inputs=artefacts.NUM_INPUTS,
            model=artefacts.MODEL.fingerprint,
        )


def test_replicas_with_other_outputs_are_another_models(
    opened: MoeModel, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    stored = made(opened, tmp_path)
    for path in stored.files:
        parts = parsed(path.read_bytes())
        tensors = parts.taken_apart()
        for name in ("qweight", "scales", "qzeros"):
            kind, (rows, width), data = tensors[f"4.down_proj.{name}"]
            nbytes = len(data) // (rows * width)
            cut = b"".join(
                data[row * width * nbytes :][: width // 2 * nbytes] for row in range(rows)
            )
            tensors[f"4.down_proj.{name}"] = (kind, [rows, width // 2], cut)
        changed = Tensors.together(tensors)
        said = {"__metadata__": parts.header["__metadata__"]}
        path.write_bytes(joined(Tensors(said | changed.header, changed.data)))
    with pytest.raises(Incompatible, match="a down_proj of another model"):
        open_replicas(opened, stored, [4])
