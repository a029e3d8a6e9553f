"""A checkpoint's safetensors file that is cut off, or whose header says what is not so.

Thousands of altered headers: the torment `hostile_models`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts.errors import BadInput
from runtime.model.checkpoint import open_checkpoint
from tests.faults.models import Copy, refusal
from tests.helpers.families import save
from tests.helpers.safetensors import Tensors, joined, parsed


def test_missing_shard(tmp_path: Path) -> None:
    folder = save("olmoe", "hub", tmp_path, shard_size="40KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"{lost} is missing" in refusal(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_broken_index(copy: Copy, index: str) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    assert "is not an index of safetensors shards" in refusal(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: (2**40).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"\xff" + data[9:],
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b'"F32"', b'"F64"', 1),
    ],
)
def test_damaged_shard(copy: Copy, damage: Callable[[bytes], bytes]) -> None:
    path = copy("olmoe") / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path} is truncated or no safetensors file" in refusal(path.parent)


def test_a_long_header_is_not_read(copy: Copy) -> None:
    path = copy("olmoe") / "model.safetensors"
    for length in (101 << 20, 2**63, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{" * 4096)
        assert "truncated or no safetensors file" in refusal(path.parent)


@pytest.mark.parametrize(
    "change",
    [
        lambda first, second: first.update(data_offsets=second["data_offsets"], shape=second["shape"]),  # overlap
        lambda first, second: second.update(data_offsets=[at + 4 for at in second["data_offsets"]]),  # hole
        lambda first, second: first.update(shape=[2**40, 2**40]),
        lambda first, second: first.update(shape=[-1]),
        lambda first, second: first.update(dtype="F8_E8M0"),
        lambda first, second: first.update(data_offsets=[]),
        lambda first, second: first.clear(),
    ],
)
def test_a_header_that_does_not_fit_its_file(copy: Copy, change: Callable[[dict, dict], object]) -> None:
    path = copy("olmoe") / "model.safetensors"
    tensors = parsed(path.read_bytes())
    change(*[entry for name, entry in tensors.header.items() if name != "__metadata__"][:2])
    path.write_bytes(joined(tensors))
    with pytest.raises(BadInput, match="model.safetensors"):
        open_checkpoint(path.parent)


def test_a_tensor_named_twice(copy: Copy) -> None:
    """The last entry counts, so that some bytes belong to no tensor."""
    path = copy("olmoe") / "model.safetensors"
    tensors = parsed(path.read_bytes())
    size = len(tensors.data)
    first = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [size, size + 4]}})
    twice = f"{first[:-1]}, {json.dumps(tensors.header)[1:]}"
    path.write_bytes(joined(Tensors(tensors.header, tensors.data + bytes(4)), twice))
    assert "truncated or no safetensors file" in refusal(path.parent)


def test_an_index_nested_without_end(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "nested too deeply" in refusal(folder)
