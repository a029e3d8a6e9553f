"""What a checkpoint says before it is opened is what it says opened, in every format."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadInput
from moectl.shared.glance import CheckpointGlance, glance
from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tests.helpers import families, gguf_files
from tests.helpers.published import MAKERS, publish

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def check(path: Path, *, padded: float = 0.0) -> CheckpointGlance:
    """The glance agrees with the opened model, up to the part of an expert that pads it in its
    slot."""
    seen = glance(str(path))
    opened = open_model(str(path))
    opened.store.close()
    for name in ("num_layers", "num_experts", "top_k"):
        assert getattr(seen.shape, name) == getattr(opened.shape, name)
    for name in ("expert_nbytes", "nbytes"):
        assert getattr(seen.shape, name) == pytest.approx(getattr(opened.shape, name), rel=padded)
    assert seen.weight_nbytes == pytest.approx(opened.weight_nbytes, rel=padded)
    assert f"torch.{seen.dtype}" == str(opened.dtype)
    return seen


@pytest.mark.parametrize("method", [None, *MAKERS])
def test_every_format_is_known(tmp_path: Path, method: str | None) -> None:
    family = "gpt_oss" if method == "mxfp4" else "qwen3_moe"
    fields = SIZES if family == "gpt_oss" else SIZES | {"moe_intermediate_size": 96}
    plain = families.save(family, "hub", tmp_path / "plain", torch.bfloat16, fields=fields)
    if method is None:
        assert check(plain).expert_format == "bfloat16, 16 bits"
    else:
        check(publish(plain, tmp_path / "published", method), padded=0.08)


@pytest.mark.parametrize(
    ("family", "types", "told"),
    [
        ("qwen3_moe", gguf_files.every("Q8_0"), "Q8_0, 8.5 bits"),
        ("qwen3_moe", gguf_files.every("F16"), "F16, 16 bits"),
        ("gpt_oss", gguf_files.IN_MXFP4, "MXFP4, 4.31 bits"),
    ],
)
def test_a_gguf_file_is_known(
    tmp_path: Path, family: str, types: gguf_files.Types, told: str
) -> None:
    assert check(gguf_files.write(family, tmp_path / "model.gguf", types)).expert_format == told


def test_a_gguf_file_is_known_without_torch(tmp_path: Path) -> None:
    path = gguf_files.write("qwen3_moe", tmp_path / "model.gguf", gguf_files.every("Q8_0"))
    code = (
        "import sys\nsys.modules.update(torch=None, transformers=None, gguf=None)\n"
        f"from moectl.shared.glance import glance\nprint(glance({str(path)!r}).expert_format)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Q8_0, 8.5 bits\n"


def test_what_is_not_there_or_not_read_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("olmoe"), tmp_path / "copy")
    weights = folder / "model.safetensors"
    stored = folder / "config.json"
    config = json.loads(stored.read_text())
    for entries, line in (
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq'"),
        ({"model_type": "dbrx"}, "dbrx cannot be opened"),
    ):
        stored.write_text(json.dumps(config | entries))
        with pytest.raises(BadInput, match=line):
            glance(str(folder))
    stored.write_text(json.dumps(config))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(BadInput, match=r"model\.safetensors is truncated or no safetensors file"):
        glance(str(folder))
    weights.unlink()
    with pytest.raises(BadInput, match="holds neither model.safetensors nor"):
        glance(str(folder))
    with pytest.raises(BadInput, match="nor a model of the hub that was downloaded"):
        glance("no/such")


def test_a_shape_that_the_config_does_not_say_is_unknown(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("olmoe"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    del config["num_experts_per_tok"]
    (folder / "config.json").write_text(json.dumps(config))
    seen = glance(str(folder))
    assert seen.shape is None and "has no num_experts_per_tok" in seen.unknown
