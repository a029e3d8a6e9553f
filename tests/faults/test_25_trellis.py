"""Replicas in trellis codes that are not what was written: a flipped byte, a file cut off or
replaced under use, a header or a map of columns that would lead kernels beyond their arrays.

Of a quantize that is killed, meets a full disk or is taken up again: tests/profilers/quantise.
"""

from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput, Incompatible
from artifacts.quantisation.replica_file import (
    file_hash,
    is_intact,
    read_replica,
    verify,
    write_replicas,
)
from artifacts.shape import Shape
from runtime.kernels.trellis import linear
from runtime.tiers.replica_store import ReplicaStore
from tests.faults.test_09_flipped_byte import flip
from tests.helpers.safetensors import Tensors, joined, parsed
from tools.gpu.checks.trellis import random_trellis

NUM_INPUTS = 64


def written(path: Path, seed: int) -> Path:
    """One projection of an expert at 0.8 and 2 bits."""
    coded = {
        bits: {"down_proj": random_trellis(96, NUM_INPUTS, half_bits, 16, seed=seed)}
        for bits, half_bits in ((0.8, 1), (2, 3))
    }
    write_replicas(path, coded, {"model": "m", "layer": "0", "expert": "0"})
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "expert.safetensors", 0)


def opened(path: Path, bits: float = 0.8) -> ReplicaStore:
    return ReplicaStore(
        [path],
        bits=bits,
        shape=Shape(1, 1, 1, 100),
        num_inputs={"down_proj": NUM_INPUTS},
        model="m",
    )


def read(store: ReplicaStore) -> torch.Tensor:
    out = torch.zeros(store.layout.nbytes, dtype=torch.uint8)
    store.read(0, 0, out)
    return out


def test_every_byte_counts(path: Path) -> None:
    hash = file_hash(path)
    whole = path.read_bytes()
    for at in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 97):
        flip(path, at)
        assert not is_intact(path), at
        with pytest.raises(BadInput, match="damaged or replaced"):
            verify(path, hash)
        path.write_bytes(whole)
    assert is_intact(path)


def test_a_file_cut_off_or_replaced_under_use_is_told(path: Path) -> None:
    store = opened(path)
    before = read(store)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(
        BadInput, match="changed while in use and is damaged: run moectl quantize again"
    ):
        read(store)
    written(path, 0)
    assert torch.equal(read(store), before)
    written(path, 1)
    with pytest.raises(BadInput, match="was replaced while in use: start the run again"):
        read(store)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("0.8.down_proj.half_bits", "2"),
        ("0.8.down_proj.half_bits", "9" * 5000),
        ("state_bits", "17"),
        ("down_proj.outputs", "128"),
        ("down_proj.outputs", "-32"),
    ],
)
def test_headers_of_another_shape_reach_no_kernel(path: Path, name: str, text: str) -> None:
    tensors = parsed(path.read_bytes())
    tensors.header["__metadata__"][name] = text
    path.write_bytes(joined(tensors))
    with pytest.raises(Incompatible, match="a replica of another shape"):
        opened(path)
    with pytest.raises(BadInput, match="damaged or no replica file"):
        read_replica(path, 0.8)


def test_codes_that_are_too_few_reach_no_kernel(path: Path) -> None:
    parts = parsed(path.read_bytes())
    tensors = parts.taken_apart()
    kind, (count,), data = tensors["0_8.down_proj.codes"]
    tensors["0_8.down_proj.codes"] = (kind, [count // 2], data[: len(data) // 2])
    changed = Tensors.together(tensors)
    path.write_bytes(
        joined(
            Tensors({"__metadata__": parts.header["__metadata__"]} | changed.header, changed.data)
        )
    )
    with pytest.raises(Incompatible, match="a replica of another shape"):
        opened(path)


@pytest.mark.parametrize("octet", [0, 255])
def test_a_damaged_map_of_columns_stays_within_the_arrays(path: Path, octet: int) -> None:
    """Bytes are not looked at unless a run is told to: kernels must not rely on them."""
    store = opened(path)
    replica = store.layout.views(read(store))["down_proj"]
    replica.high.fill_(octet)
    for count in (1, 3):
        assert linear(torch.ones(count, NUM_INPUTS), replica).isfinite().all()
