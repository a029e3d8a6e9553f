"""Models of the hub by name, against a stand-in of the hub: the files that are downloaded, and those
that are not."""

import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from artifacts.errors import BadInput, OutOfResources
from artifacts.modelshapes.known import MODELS
from artifacts.modelshapes.repositories import REPOSITORIES
from runtime.model.files import locate
from runtime.model.files.hub import repository
from runtime.model.files.hub.kept import kept_models
from runtime.model.files.hub.names import HubName, hub_name
from runtime.model.files.hub.quants import SeveralQuants, quants_of
from runtime.model.gguf.shape import gguf_shape
from tests.conftest import Checkpoint
from tests.helpers import gguf_files
from tests.helpers import hub as stand_in
from tests.helpers.hub import StandInHub

GGUF = "owner/Tiny-GGUF"
PLAIN = "owner/Tiny"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a repository with three models in GGUF, one of them in parts."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "UD-Q6_K").mkdir()
    gguf_files.write("qwen3_moe", folder / "Tiny-Q8_0.gguf", gguf_files.every("Q8_0"))
    gguf_files.write("qwen3_moe", folder / "Tiny.q4_0.gguf", gguf_files.every("Q4_0"))
    parts = folder / "UD-Q6_K" / "Tiny-UD-Q6_K.gguf"
    gguf_files.write("qwen3_moe", parts, gguf_files.every("Q6_K"), parts=2)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("a card")
    return folder


@pytest.fixture
def hub(
    served: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StandInHub]:
    plain = shutil.copytree(checkpoint("olmoe"), tmp_path / "plain")
    (plain / "consolidated.safetensors").write_bytes(b"the weights again")
    (plain / "original").mkdir()
    (plain / "original" / "model.safetensors").write_bytes(b"another version")
    monkeypatch.chdir(tmp_path)
    with stand_in.running() as running:
        stand_in.connect(running, tmp_path / "home", monkeypatch)
        running.add(GGUF, served)
        running.add(PLAIN, plain)
        yield running


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    locate._by_name.cache_clear()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3-30b-a3b", HubName("Qwen/Qwen3-30B-A3B")),
        ("Qwen3-30B-A3B:Q4_K_M", HubName("unsloth/Qwen3-30B-A3B-GGUF", "Q4_K_M")),
        ("mixtral-8x7b:Q4_K_M", HubName("mistralai/Mixtral-8x7B-Instruct-v0.1", "Q4_K_M")),
        ("owner/name:Q8_0@refs/pr/1", HubName("owner/name", "Q8_0", "refs/pr/1")),
        ("hf.co/owner/name", HubName("owner/name")),
        ("https://huggingface.co/owner/name/", HubName("owner/name")),
        ("gpt2", None),
        ("a/b/c", None),
        ("~/name", None),
    ],
)
def test_a_name_means_one_repository(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name
    assert name is None or hub_name(str(name)) == name


def test_every_known_shape_has_a_repository() -> None:
    assert REPOSITORIES.keys() >= MODELS.keys()
    assert all(hub_name(each.hub) == HubName(each.hub) for each in REPOSITORIES.values())


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Qwen3.8-FN-GSQ-RCO-IQ2_XS.gguf", "IQ2_XS"),
        ("BF16/gpt-oss-20b-BF16-00001-of-00002.gguf", "BF16"),
        ("mixtral.Q5_0.gguf", "Q5_0"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("tiny-TQ1_0.gguf", "TQ1_0"),
        ("deepseek-v4-w2Q2K.gguf", "deepseek-v4-w2Q2K"),
    ],
)
def test_a_model_is_called_by_the_type_in_its_files_name(file: str, word: str) -> None:
    (quant,) = quants_of({file: 3, "mmproj-F16.gguf": 1})
    assert quant == (word, (file,), 3)


def test_one_model_of_several_is_downloaded_with_all_its_parts(hub: StandInHub) -> None:
    with pytest.raises(SeveralQuants) as several:
        locate.find(GGUF)
    assert str(several.value) == (f"{GGUF} has 3 models in GGUF: name one, as {GGUF}:UD-Q6_K")
    assert [quant.name for quant in several.value.quants] == ["q4_0", "UD-Q6_K", "Q8_0"]
    with pytest.raises(BadInput, match="has no Q5_K: it has q4_0, UD-Q6_K, Q8_0"):
        locate.find(f"{GGUF}:Q5_K")
    found = locate.find(f"{GGUF}:ud-q6_k")
    assert found.missing_nbytes == found.nbytes and found.free_nbytes > 0 and not hub.sent
    path = locate.locate(f"hf.co/{GGUF}:UD-Q6_K")
    assert path.name == "Tiny-UD-Q6_K-00001-of-00002.gguf"
    assert hub.sent_nbytes() == found.nbytes == sum(map(os.path.getsize, locate.parts_of(path)))
    assert found.missing_nbytes == 0 and found.kept_nbytes == found.nbytes
    assert locate.locate(f"{GGUF}:UD-Q6_K") == path
    assert hub.sent_nbytes() == found.nbytes  # nothing twice


def test_of_safetensors_what_belongs_to_the_model_is_downloaded(hub: StandInHub) -> None:
    folder = locate.locate(PLAIN)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors"} <= names
    assert not any("consolidated" in name or "/" in name for name in names)


def test_a_connection_that_breaks_off_is_taken_up(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 18)
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.breaks = 1
    hub.breaks_after = 1 << 20
    found = locate.find(f"{GGUF}:Q8_0")
    path = found.fetch()
    assert [nbytes for _, nbytes in hub.sent] == [1 << 20, found.nbytes - (1 << 20)]
    assert path.read_bytes() == (hub.repos[GGUF]["main"] / path.name).read_bytes()


def test_a_download_that_breaks_off_is_told_and_taken_up_by_the_next(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    found = locate.find(f"{GGUF}:UD-Q6_K")
    smaller, larger = sorted(file.nbytes for file in found.files.values())
    hub.breaks = 99
    hub.breaks_after = smaller
    with pytest.raises(BadInput, match="UD-Q6_K broke off .*: run this again, whole files are kep"):
        found.fetch()
    assert found.missing_nbytes == larger
    hub.breaks = 0
    hub.sent.clear()
    go_offline(monkeypatch)
    with pytest.raises(BadInput, match="only 1 of 2 files of .*, and the hub gives no more"):
        locate.locate(f"{GGUF}:UD-Q6_K")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert len(locate.parts_of(found.fetch())) == 2
    assert hub.sent_nbytes() == larger


def test_a_disk_that_is_too_small_is_told_before_the_download(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(repository.shutil, "disk_usage", lambda _: usage(1 << 20))
    with pytest.raises(OutOfResources, match=r"UD-Q6_K takes 0\.0 GiB more, and .* HF_HOME"):
        locate.locate(f"{GGUF}:UD-Q6_K")
    assert not hub.sent


def test_a_revision_is_another_model(hub: StandInHub, served: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    shutil.copy(served / "Tiny.q4_0.gguf", old / "Tiny-Q2_K.gguf")
    hub.add(GGUF, old, "v1")
    assert locate.locate(f"{GGUF}@v1").name == "Tiny-Q2_K.gguf"
    assert locate.locate(f"{GGUF}:q2_k@v1").name == "Tiny-Q2_K.gguf"
    assert locate.find(f"{GGUF}:q4_0").missing_nbytes == 0  # the same bytes under another name
    with pytest.raises(BadInput, match="the hub has no such revision of it"):
        locate.locate(f"{GGUF}@v2")


def test_a_repository_with_nothing_that_is_read_is_refused(hub: StandInHub, tmp_path: Path) -> None:
    for name, file, told in (
        ("owner/bins", "pytorch_model.bin", "pickled weights"),
        ("owner/none", "adapter.safetensors", "no weights of either"),
    ):
        folder = tmp_path / "served" / name
        folder.mkdir(parents=True)
        (folder / file).write_bytes(b"x")
        hub.add(name, folder)
        with pytest.raises(BadInput, match=f"{name} holds {told}.*: moectl opens safetensors"):
            locate.locate(name)
    with pytest.raises(BadInput, match="the hub has no such model, or a private one"):
        locate.locate("owner/other")
    assert not hub.sent


@pytest.mark.parametrize("quant", ["Q8_0", "UD-Q6_K"])
def test_of_a_model_that_is_described_the_header_is_read(
    hub: StandInHub, served: Path, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "_FIRST_NBYTES", 1 << 12)
    with locate.described(f"{GGUF}:{quant}") as path:
        told = gguf_shape(path)
    assert hub.sent_nbytes() < locate.find(f"{GGUF}:{quant}").nbytes / 20
    assert told == gguf_shape(next(served.rglob(path.name)))
    assert not path.exists() and not kept_models()


def test_of_a_folder_that_is_described_the_config_is_read(hub: StandInHub) -> None:
    with locate.described(PLAIN) as folder:
        assert folder.name == "Tiny"
        assert locate.read_config(folder)["model_type"] == "olmoe"
    assert [name for name, _ in hub.sent] == ["config.json"]
    with locate.described(str(hub.repos[PLAIN]["main"])) as folder:
        assert folder == hub.repos[PLAIN]["main"]


def test_a_hub_without_ranges_sends_no_weights(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "_FIRST_NBYTES", 1 << 12)
    hub.ranges = False
    with (
        pytest.raises(BadInput, match="the hub sends Tiny-Q8_0.gguf of .* whole"),
        locate.described(f"{GGUF}:Q8_0"),
    ):
        pass


def test_what_was_downloaded_opens_offline(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [locate.locate(name) for name in (PLAIN, f"{GGUF}:Q8_0", f"{GGUF}:UD-Q6_K")]
    go_offline(monkeypatch)
    assert [locate.locate(name) for name in (PLAIN, f"{GGUF}:Q8_0", f"{GGUF}:UD-Q6_K")] == paths
    with pytest.raises(SeveralQuants, match="has 2 models in GGUF"):
        locate.locate(GGUF)
    with pytest.raises(BadInput, match=r"hub id \(HF_HUB_OFFLINE is set\): .*--include '\*q4_0"):
        locate.locate(f"{GGUF}:q4_0")
    locate.parts_of(paths[2])[1].unlink()
    (paths[0] / "model.safetensors").unlink()
    locate._by_name.cache_clear()
    for name, told in ((f"{GGUF}:UD-Q6_K", "only 1 of 2 files of"), (PLAIN, "only a part of")):
        with pytest.raises(BadInput, match=f"{told} .*, and the hub gives no more"):
            locate.locate(name)


def test_models_of_other_programs_are_found(
    hub: StandInHub, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    studio = home / ".lmstudio" / "models" / "owner" / "Other-GGUF"
    studio.mkdir(parents=True)
    shutil.copy(served / "Tiny-Q8_0.gguf", studio)
    blob = stand_in.into_ollama(home, served / "Tiny.q4_0.gguf", "registry.ollama.ai/library/ti:1b")
    stand_in.into_ollama(home, served / "Tiny.q4_0.gguf", "hf.co/owner/Third-GGUF:Q4_0")
    for name, path in {
        "owner/Other-GGUF": studio / "Tiny-Q8_0.gguf",
        "owner/Other-GGUF:Q8_0": studio / "Tiny-Q8_0.gguf",
        "ti:1b": blob,
        "hf.co/owner/Third-GGUF:Q4_0": blob,
        "owner/Third-GGUF:Q4_0": blob,
    }.items():
        assert locate.locate(name) == path, name
    assert not hub.asked
    with pytest.raises(BadInput, match="a hub id is owner/name"):
        locate.locate("ti:7b")
    downloaded = locate.locate(f"{GGUF}:q4_0")
    assert [(model.name, model.path, model.where) for model in kept_models()] == [
        ("hf.co/owner/Third-GGUF:Q4_0", blob, "Ollama"),
        ("owner/Other-GGUF:Q8_0", studio / "Tiny-Q8_0.gguf", "LM Studio"),
        (f"{GGUF}:q4_0", downloaded, "hub cache"),
        ("ti:1b", blob, "Ollama"),
    ]
    go_offline(monkeypatch)
    assert {model.path for model in kept_models()} == {
        locate.locate(model.name) for model in kept_models()
    }
