"""What commands say of a quantised checkpoint. One that is not whole is refused in one line, with
nothing written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moectl.cli import main
from moectl.commands.start.doctor import findings as findings
from runtime.model.open import open_model
from tests.helpers import families
from tests.helpers.published import publish
from tests.helpers.said import problems

WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain one, and one of the same numbers in FP8, which its config says of a part of the
    model."""
    folder = tmp_path_factory.mktemp("fp8")
    plain = families.save("qwen3_moe", "hub", folder / "plain", torch.bfloat16, fields=WIDE)
    published = publish(plain, folder / "published", "fp8")
    path = published / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            config | {"language": {"quantization_config": config.pop("quantization_config")}}
        )
    )
    return plain, published


@pytest.fixture
def scaleless(checkpoints: tuple[Path, Path], tmp_path: Path) -> Path:
    """The one in FP8 with its scales removed."""
    out = shutil.copytree(checkpoints[1], tmp_path / "scaleless")
    tensors = load_file(out / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
    save_file(rest, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_the_doctor_knows_the_format_of_experts(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    """Replicas of the same model are as large, whatever its format."""
    told = []
    rooms = set()
    for folder in checkpoints:
        opened = open_model(str(folder))
        told.append(findings.of_experts(opened.expert_format, "bfloat16").says)
        weight_nbytes = opened.weight_nbytes
        found = findings.of_room(
            tmp_path / "moe.duckdb", opened.stored_shape, weight_nbytes=weight_nbytes
        )
        rooms.add(found.says.split(" beside ")[0])
        opened.store.close()
    assert told[0] == "stored as bfloat16, 16 bits a weight with scales; computed in bfloat16"
    assert re.fullmatch(
        r"stored as fp8, 8\.\d+ bits a weight with scales; computed in bfloat16", told[1]
    )
    assert len(rooms) == 1


@pytest.mark.parametrize(
    "command", [("run", "--prompt", "a"), ("profile", "--data", "builtin:held-out"), ("quantize",)]
)
def test_weights_without_scales(
    scaleless: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    name, *options = command
    assert main([name, str(scaleless), *options]) == 3
    said = capfd.readouterr()
    assert said.out == "" and problems(said.err).count("\n") == 1
    assert (
        ".weight is float8_e4m3fn without scales, quantised by fp8: download the checkpoint again"
        in said.err
    )
    assert sorted(tmp_path.rglob("*")) == before
