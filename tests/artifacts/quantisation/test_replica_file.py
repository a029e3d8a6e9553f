"""Replica files: round trips, identical bytes every time, and damage reported in one line."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from artifacts.errors import BadInput, OutOfResources
from artifacts.quantisation.packing import Packed, packed_shapes
from artifacts.quantisation.replica_file import (
    file_hash,
    is_intact,
    read_metadata,
    read_replica,
    replica_nbytes,
    verify,
    widths,
    write_replicas,
)
from artifacts.quantisation.trellis.trellis import Trellis
from tests.artifacts.quantisation.test_trellis import random_trellis

METADATA = {"model": "a" * 64, "layer": "2", "expert": "5", "note": "Größe"}


def packed(
    bits: int, num_outputs: int = 48, num_inputs: int = 64, group_size: int = 32, seed: int = 0
) -> Packed:
    random = np.random.default_rng(seed + bits)
    tensors = dict.fromkeys(("qweight", "qzeros", "scales"))
    for name, (dtype, shape) in packed_shapes(num_outputs, num_inputs, bits, group_size).items():
        values = (
            random.integers(-(2**31), 2**31, shape)
            if dtype == torch.int32
            else random.random(shape)
        )
        tensors[name] = torch.from_numpy(values).to(dtype)
    return Packed(bits, group_size, num_inputs, **tensors)


def replicas() -> dict[int, dict[str, Packed | torch.Tensor]]:
    bias = torch.arange(48).to(torch.bfloat16)
    return {
        bits: {
            "gate_up_proj": packed(bits),
            "gate_up_proj_bias": bias,
            "down_proj": packed(bits, num_outputs=33, num_inputs=24, group_size=24),
        }
        for bits in (4, 1, 3)
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "L002-E005.safetensors"
    write_replicas(path, replicas(), METADATA)
    return path


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_a_width_comes_back(path: Path, bits: int) -> None:
    parts_read = read_replica(path, bits, model="a" * 64, key=(2, 5))
    assert parts_read.keys() == replicas()[bits].keys()
    for name, part in replicas()[bits].items():
        if isinstance(part, torch.Tensor):
            assert torch.equal(parts_read[name], part) and parts_read[name].dtype == part.dtype
            continue
        assert (
            parts_read[name].bits,
            parts_read[name].group_size,
            parts_read[name].num_inputs,
        ) == (
            bits,
            part.group_size,
            part.num_inputs,
        )
        for field in ("qweight", "scales"):
            assert torch.equal(getattr(parts_read[name], field), getattr(part, field))
        assert (parts_read[name].qzeros is None) == (bits == 1)
    assert replica_nbytes(path)[bits] == sum(part.nbytes for part in replicas()[bits].values())


def test_any_safetensors_reader_reads_it(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("3.down_proj.scales"), replicas()[3]["down_proj"].scales)
        assert file.metadata()["note"] == "Größe"
    assert widths(read_metadata(path)) == [1, 3, 4]


def test_the_same_bytes_in_every_process(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    code = (
        "import sys; from pathlib import Path; from "
        "tests.artifacts.quantisation.test_replica_file import "
        "*;write_replicas(Path(sys.argv[1]), replicas(), dict(reversed(METADATA.items())))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(other)], env=environment, check=True)
    assert other.read_bytes() == path.read_bytes()


def test_damage_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    hash = file_hash(path)
    verify(path, hash)
    assert is_intact(path)
    for at in (len(whole) - 1, len(whole) // 2, whole.index(b"Gr")):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not is_intact(path)
        with pytest.raises(BadInput, match="damaged or replaced"):
            verify(path, hash)
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput, match="damaged or no replica file"):
            read_replica(path, 4)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadInput, match="its length"):
        read_replica(path, 4)
    path.unlink()
    with pytest.raises(BadInput, match="cannot read .*No such file"):
        read_replica(path, 4)


def test_a_replaced_file_is_refused(path: Path) -> None:
    with pytest.raises(BadInput, match="another model"):
        read_replica(path, 4, model="b" * 64)
    with pytest.raises(BadInput, match="another expert than layer 2, expert 6"):
        read_replica(path, 4, key=(2, 6))
    with pytest.raises(BadInput, match="no 2-bit replica, only 1, 3, 4"):
        read_replica(path, 2)


def test_a_foreign_file_is_refused(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"4.gate_up_proj.qweight": torch.zeros(3, dtype=torch.int32)}, path)
    with pytest.raises(BadInput, match="its format is None, not moectl-replica-2"):
        read_replica(path, 4)
    wrong = replicas()
    wrong[3]["down_proj"] = packed(4, num_outputs=33, num_inputs=24, group_size=24)
    write_replicas(path, wrong, METADATA)
    with pytest.raises(BadInput, match="down_proj at 3 bits has tensors"):
        read_replica(path, 3)


def test_a_full_disk_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfResources, match="no space left to write .*L002-E005"):
        write_replicas(path, replicas(), METADATA | {"note": "other"})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def trellises() -> dict[float, dict[str, Trellis | torch.Tensor]]:
    return {
        bits: {
            "gate_up_proj": random_trellis(half_bits, 16, is_rotated=False),
            "down_proj": random_trellis(half_bits, 32, num_outputs=33, seed=1),
            "down_proj_bias": torch.arange(33.0),
        }
        for bits, half_bits in ((1.25, 2), (0.6, 1), (2, 3))
    }


@pytest.mark.parametrize("bits", [0.6, 1.25, 2])
def test_trellis_codes_come_back(tmp_path: Path, bits: float) -> None:
    path = tmp_path / "trellis.safetensors"
    write_replicas(path, trellises(), METADATA)
    parts = read_replica(path, bits, model="a" * 64, key=(2, 5))
    written = trellises()[bits]
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(parts[name].dequantised(), written[name].dequantised())
    assert torch.equal(parts["down_proj_bias"], written["down_proj_bias"])
    assert widths(read_metadata(path)) == [0.6, 1.25, 2] and is_intact(path)
    assert replica_nbytes(path)[bits] == sum(part.nbytes for part in written.values())


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (b'"1.25.down_proj.half_bits":"2"', b'"1.25.down_proj.half_bits":"3"'),
        (b'"1.25.down_proj.half_bits":"2"', b'"1.25.down_proj.half_bits":"9"'),
        (b'"down_proj.outputs":"33"', b'"down_proj.outputs":"65"'),
        (b'"down_proj.inputs":"40"', b'"down_proj.inputs":"49"'),
        (b'"state_bits":"12"', b'"state_bits":"32"'),
    ],
)
def test_trellis_codes_that_are_described_wrongly_are_refused(
    tmp_path: Path, text: bytes, changed: bytes
) -> None:
    path = tmp_path / "trellis.safetensors"
    write_replicas(path, trellises(), METADATA)
    assert path.read_bytes().count(text) == 1
    path.write_bytes(path.read_bytes().replace(text, changed))
    with pytest.raises(BadInput, match="damaged or no replica file"):
        read_replica(path, 1.25)
