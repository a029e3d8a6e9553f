"""Models by name on the command line, against a stand-in of the hub: from a name to an answer."""

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from moectl.bundled import demo_model
from moectl.cli import main
from runtime.model.files import locate
from runtime.model.files.hub import repository
from tests.helpers import gguf_files
from tests.helpers import hub as stand_in
from tests.helpers.hub import StandInHub

GGUF = "unsloth/Qwen3-30B-A3B-GGUF"
PLAIN = "openai/gpt-oss-20b"
ASK = ("--prompt", "Return the", "--max-new-tokens", "2", "--greedy", "--experts", "exact")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name in ("Q8_0", "UD-Q4_K_XL"):
        kind = gguf_files.every("Q8_0")
        gguf_files.write("qwen3_moe", folder / f"Qwen3-30B-A3B-{name}.gguf", kind)
    return folder


@pytest.fixture
def hub(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """The hub with the bundled model under the name of gpt-oss-20b, and a small model in GGUF."""
    monkeypatch.chdir(tmp_path)
    with stand_in.running() as running:
        stand_in.connect(running, tmp_path / "home", monkeypatch)
        running.add(GGUF, served)
        running.add(PLAIN, demo_model())
        yield running


def test_a_short_name_is_downloaded_and_answers(
    hub: StandInHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "gpt-oss-20b", *ASK]) == 0
    first = capsys.readouterr()
    told, *others = first.err.splitlines()
    assert told.startswith(f"Downloading {PLAIN}: 0.0 GiB to ") and told.endswith(" GiB free")
    assert others[0].startswith("Loading gpt-oss-20b: ") and "Fetching" not in first.err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    locate._by_name.cache_clear()
    assert main(["run", f"hf.co/{PLAIN}", *ASK]) == 0
    again = capsys.readouterr()
    assert again.out == first.out and "Downloading" not in again.err


def test_the_quants_of_a_repository_are_listed(
    hub: StandInHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", GGUF, *ASK]) == 3
    listed = capsys.readouterr().err.splitlines()
    assert [" ".join(line.split()) for line in listed] == [
        f"{GGUF}:Q8_0 0.0 GiB",
        f"{GGUF}:UD-Q4_K_XL 0.0 GiB",
        f"moectl: {GGUF} has 2 models in GGUF: name one, as {GGUF}:UD-Q4_K_XL",
    ]
    assert main(["pack", "qwen3-30b-a3b:ud-q4_k_xl", "packed"]) == 3  # GGUF is not packed
    assert "Downloading" in capsys.readouterr().err
    assert {name for name, _ in hub.sent} == {"Qwen3-30B-A3B-UD-Q4_K_XL.gguf"}


def test_a_disk_that_is_too_small_ends_the_command_at_once(
    hub: StandInHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(repository.shutil, "disk_usage", lambda _: usage(1000))
    assert main(["run", PLAIN, *ASK]) == 4
    told, refused = capsys.readouterr().err.splitlines()
    assert told.startswith("Downloading") and "0.0 GiB free: free some, or set HF_HOME" in refused
    assert not hub.sent


def test_a_revision_is_a_part_of_the_name(
    hub: StandInHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", PLAIN, "--revision", "v2", *ASK]) == 3
    assert "the hub has no such revision of it" in capsys.readouterr().err
    for model in ([], [str(demo_model())], [f"{PLAIN}@main"]):
        assert main(["run", *model, "--revision", "v2", *ASK]) == 2
        assert "--revision v2 goes with a model of the hub" in capsys.readouterr().err
    assert not hub.sent


def test_the_models_of_this_machine_are_listed(
    hub: StandInHub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models"]) == 0
    assert "none is here: `moectl run owner/name` downloads one" in capsys.readouterr().out
    home = tmp_path / "home"
    file = served / "Qwen3-30B-A3B-Q8_0.gguf"
    stand_in.into_ollama(home, file, "registry.ollama.ai/library/qwen3:30b")
    dense = home / ".lmstudio" / "models" / "owner" / "dense"
    dense.mkdir(parents=True)
    (dense / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(demo_model() / "model.safetensors", dense)
    locate.locate(PLAIN)
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [(row["name"], row["format"], row["where"]) for row in listed] == [
        (PLAIN, "bfloat16, 16 bits", "hub cache"),
        ("owner/dense", "", "LM Studio"),
        ("qwen3:30b", "Q8_0, 8.5 bits", "Ollama"),
    ]
    assert "hidden_size" in listed[1]["refused"] and listed[2]["nbytes"] == file.stat().st_size
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "owner/dense" not in shown and "1 others do not open: --json has the reasons" in shown
    assert main(["doctor", "qwen3:30b"]) == 0
