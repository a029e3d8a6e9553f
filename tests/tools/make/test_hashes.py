"""The lock has the versions of constraints.txt, no others but what torch's build for CUDA needs,
and no address."""

import hashlib
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tools.make import hashes

ENTRY = re.compile(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def locked() -> dict[str, tuple[str, int]]:
    """The version and the number of hashes by name; every line belongs to an entry or is a
    comment."""
    text = hashes.HASHES.read_text(encoding="utf-8")
    assert not re.sub(r"^#.*\n", "", ENTRY.sub("", text), flags=re.MULTILINE).strip()
    return {
        name: (version, values.count("--hash")) for name, version, values in ENTRY.findall(text)
    }


def test_names_and_versions_are_those_of_the_constraints() -> None:
    lines = hashes.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    constraints = dict(line.split("==") for line in lines if not line.startswith("#"))
    found = {name: version for name, (version, _) in locked().items()}
    assert {name: found.get(name) for name in constraints} == constraints
    assert all(name.startswith(("nvidia-", "cuda-")) for name in found.keys() - constraints.keys())


def test_torch_has_a_build_for_cuda_and_one_for_the_cpu() -> None:
    assert locked()["torch"][1] == 2


def test_the_page_names_what_moectl_needs() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^pip install --require-hashes -c hashes\.txt (.*)$", page, re.MULTILINE)
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    assert sorted(line.split()) == sorted(
        [*(re.match(r"[\w-]+", need)[0] for need in needs), "setuptools", "setuptools-scm"]
    )


def test_pip_is_asked_and_files_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess:
        assert "--dry-run" in command and command[-1] == hashes.CONSTRAINTS
        made = {"metadata": {"name": "A.b_C", "version": "1.0+cpu"}}
        made["download_info"] = {"archive_info": {"hashes": {"sha256": "f" * 64}}}
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"install": [made]}))

    monkeypatch.setattr(subprocess, "run", answer)
    found = hashes.resolved()
    wheel = tmp_path / "a_b_c-1.0+gpu-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    hashes.add_files(found, [wheel])
    one = hashlib.sha256(b"wheel").hexdigest()
    assert ENTRY.findall(hashes.text_of(found)) == [
        ("a-b-c", "1.0", f" \\\n    --hash=sha256:{one} \\\n    --hash=sha256:{'f' * 64}")
    ]
    with pytest.raises(KeyError):
        hashes.add_files(found, [wheel.with_name("a_b_c-2.0-py3-none-any.whl")])
