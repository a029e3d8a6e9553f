"""Names of models that are found, and names that are not: at once where the hub cannot have them,
else in seconds."""

import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from artifacts.errors import BadInput
from moectl.cli import main
from runtime.model.files import locate


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with the folders of two models and another one."""
    for name in ("my-model", "models/olmoe", "my-modlx"):
        (tmp_path / name).mkdir(parents=True)
        if name != "my-modlx":
            (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    locate._by_name.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("my-modle", " (did you mean my-model?)"),
        ("./my-modle", " (did you mean my-model?)"),
        ("gpt2", " (did you mean gpt-oss-20b?)"),
        ("qwen3-30b-a3", " (did you mean qwen3-30b-a3b?)"),
        ("a/b/c", ""),
        ("../my-modle", ""),
        ("/nowhere/my-model", ""),
        ("x" * 300, ""),
    ],
)
def test_what_the_hub_cannot_have_is_refused_at_once(
    name: str,
    guess: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything heavy is imported, and the hub is not asked."""
    monkeypatch.setattr(locate, "look_up", None)
    told = (
        f"{name!r} is neither a folder here{guess} nor reachable as a hub id: check the path; a "
        "hub id is owner/name"
    )
    with pytest.raises(BadInput) as refused:
        locate.locate(name)
    assert str(refused.value) == told
    monkeypatch.setitem(sys.modules, "moectl.shared.opening", None)
    for command in (["run", name, "--prompt", "a"], ["pack", name, "out"]):
        assert main(command) == 3
        assert capsys.readouterr().err == f"moectl: {told}\n"


def test_a_hub_that_does_not_answer_costs_seconds(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was downloaded before is found all the same."""
    asked = []

    def model_info(self: object, name: str, *, timeout: float, **_: object) -> SimpleNamespace:
        asked.append((name, timeout))
        raise httpx2.ReadTimeout("timed out")

    def snapshot_download(name: str, *, local_files_only: bool, **_: object) -> str:
        assert local_files_only
        if name != "kept/model":
            raise LocalEntryNotFoundError("nothing here")
        return str(here / "my-model")

    (here / "my-model" / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for _ in range(2):
        assert locate.locate("kept/model") == here / "my-model"
    with pytest.raises(BadInput) as refused:
        locate.locate("some/model:Q4_K_M")
    assert str(refused.value) == (
        "'some/model:Q4_K_M' is neither a folder here nor reachable as a hub id (timed out): check "
        "the path, the id or the network, or give the folder that `hf download some/model "
        "--include '*Q4_K_M*'` makes elsewhere"
    )
    with pytest.raises(BadInput, match=r"here \(did you mean models/olmoe\?\) nor"):
        locate.locate("models/olmo")
    assert asked == [("kept/model", 5.0), ("some/model", 5.0), ("models/olmo", 5.0)]


def test_the_hub_is_not_asked_offline(here: Path) -> None:
    with pytest.raises(BadInput, match=r"hub id \(HF_HUB_OFFLINE is set\): check .* `hf download"):
        locate.locate("some/model")
    with pytest.raises(BadInput, match=r"hub id \(it is no hub id\): check the path, [^`]*$"):
        locate.locate("not a valid/id")


def test_a_gguf_file_is_found_beside_others(here: Path) -> None:
    for name in ("Model.GGUF", "mmproj-f16.gguf"):
        (here / name).write_bytes(b"GGUF")
    assert locate.locate(str(here)) == here / "Model.GGUF"
    assert locate.locate("Model.GGUF") == locate.local_gguf("Model.GGUF") == Path("Model.GGUF")
    writer = gguf.GGUFWriter(here / "vision.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert locate.locate(str(here)) == here / "Model.GGUF"
    (here / "sha256-0").write_bytes(b"GGUF")
    assert locate.locate("sha256-0") == Path("sha256-0")
    (here / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        BadInput, match="has 2 models in GGUF: give the file of one, as .*Model.GGUF"
    ):
        locate.locate(str(here))


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00000.gguf"])
def test_a_name_that_cannot_be_a_parts_is_refused(here: Path, name: str) -> None:
    (here / name).write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="is no part by its name"):
        locate.parts_of(here / name)
