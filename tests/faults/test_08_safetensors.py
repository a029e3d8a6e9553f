"""A checkpoint's safetensors file that is cut off, or whose header says what is not so.

Thousands of altered headers: the torment `hostile_models`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts.errors import BadInput
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.locate import other_files, weight_files
from runtime.model.open import open_model
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
        lambda first, second: first.update(
            data_offsets=second["data_offsets"], shape=second["shape"]
        ),  # overlap
        lambda first, second: second.update(
            data_offsets=[at + 4 for at in second["data_offsets"]]
        ),  # hole
        lambda first, second: first.update(shape=[2**40, 2**40]),
        lambda first, second: first.update(shape=[-1]),
        lambda first, second: first.update(dtype="F8_E8M0"),
        lambda first, second: first.update(data_offsets=[]),
        lambda first, second: first.clear(),
    ],
)
def test_a_header_that_does_not_fit_its_file(
    copy: Copy, change: Callable[[dict, dict], object]
) -> None:
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
    first = json.dumps(
        {"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [size, size + 4]}}
    )
    twice = f"{first[:-1]}, {json.dumps(tensors.header)[1:]}"
    path.write_bytes(joined(Tensors(tensors.header, tensors.data + bytes(4)), twice))
    assert "truncated or no safetensors file" in refusal(path.parent)


ROUTER = "model.layers.0.mlp.gate.weight"
HEAD = "lm_head.weight"


def in_two_files(folder: Path, *, twice: str, zeros_in: str, said: str | None) -> Path:
    """Cut the weights in two, with one tensor in both, of zeros in one; the index says it is in the
    file `said`."""
    path = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    tensors = load_file(path)
    path.unlink()
    files = {"a": dict(tensors), "b": {}}
    files["b"][HEAD] = files["a"].pop(HEAD)
    files["a" if twice == HEAD else "b"][twice] = tensors[twice].clone()
    files[zeros_in][twice] = torch.zeros_like(tensors[twice])
    weight_map = {name: f"{file}.safetensors" for file, held in files.items() for name in held}
    weight_map.pop(twice)
    if said:
        weight_map[twice] = f"{said}.safetensors"
    for file, held in files.items():
        save_file(held, folder / f"{file}.safetensors", metadata={"format": "pt"})
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("twice", [ROUTER, HEAD])
@pytest.mark.parametrize(("named", "other"), [("a", "b"), ("b", "a")])
def test_a_tensor_in_two_files_is_that_of_the_file_in_the_index(
    copy: Copy, twice: str, named: str, other: str
) -> None:
    folder = in_two_files(copy("olmoe"), twice=twice, zeros_in=other, said=named)
    assert open_checkpoint(folder).tensors[twice].read().any()


def test_a_tensor_in_two_files_of_which_the_index_names_none_is_refused(copy: Copy) -> None:
    folder = in_two_files(copy("olmoe"), twice=ROUTER, zeros_in="a", said=None)
    assert f"a.safetensors and b.safetensors in {folder} hold {ROUTER}" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "which says which of its *.safetensors are the model's" in refusal(folder)


def test_a_tensor_that_is_in_another_file_than_the_index_says_is_read(copy: Copy) -> None:
    """As transformers does: there is only one."""
    folder = in_two_files(copy("olmoe"), twice=ROUTER, zeros_in="b", said="a")
    tensors = load_file(folder / "b.safetensors")
    del tensors[ROUTER]
    save_file(tensors, folder / "b.safetensors", metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {ROUTER: "b.safetensors", HEAD: "a.safetensors"}}))
    assert open_checkpoint(folder).tensors[ROUTER].read().any()


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"model.{name}",
        lambda name: name.replace("layers.1.", "layers.1._fsdp_wrapped_module.").replace(
            "mlp.", "mlp._orig_mod."
        ),
    ],
)
def test_names_that_a_wrapper_lengthened_are_read(
    copy: Copy, wrapped: Callable[[str], str]
) -> None:
    folder = copy("olmoe")
    path = folder / "model.safetensors"
    plain = parsed(path.read_bytes())
    names = set(open_checkpoint(folder).tensors)
    header = {
        name if name == "__metadata__" else wrapped(name): entry
        for name, entry in plain.header.items()
    }
    path.write_bytes(joined(Tensors(header, plain.data)))
    tensors = open_checkpoint(folder).tensors
    assert set(tensors) == names and all(name == tensor.name for name, tensor in tensors.items())


def test_names_with_an_unknown_prefix_are_shown(copy: Copy) -> None:
    folder = copy("olmoe")
    path = folder / "model.safetensors"
    plain = parsed(path.read_bytes())
    header = {
        name if name == "__metadata__" else f"net.{name}": entry
        for name, entry in plain.header.items()
    }
    path.write_bytes(joined(Tensors(header, plain.data)))
    assert "but names are as net.lm_head.weight" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"]
)
def test_a_link_that_leads_nowhere_and_a_folder_are_no_files(copy: Copy, name: str) -> None:
    path = copy("olmoe") / name
    path.unlink(missing_ok=True)
    path.mkdir()
    assert f"{path} is a folder, and a file is needed there" in refusal(path.parent)
    path.rmdir()
    path.symlink_to("../../blobs/gone")
    assert f"{path} is a link to ../../blobs/gone, where there is nothing" in refusal(path.parent)


def test_a_link_that_no_model_needs_may_lead_nowhere(copy: Copy) -> None:
    folder = copy("olmoe")
    whole = [path.name for path in weight_files(folder)]
    for name in ("extra.safetensors", "extra.json"):
        (folder / name).symlink_to("gone")
    assert [path.name for path in weight_files(folder)] == whole and "extra.json" not in map(
        str, other_files(folder)
    )
    assert open_model(str(folder)).store


def test_an_index_nested_without_end(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    assert "nested too deeply" in refusal(folder)
