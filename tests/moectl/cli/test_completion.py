"""What the shell offers when Tab is pressed, without an import of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from moectl.cli import main
from runtime.policies import POLICIES
from tests import ROOT


def asked(line: str) -> dict[str, str]:
    """Return the environment with which bash asks what follows the end of `line`."""
    return {
        "_MOECTL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moectl ins", ["inspect"]),
        ("moectl run --preset mix", ["mixtral-offloading", "mixture-cache"]),
        (
            "moectl run --eviction l",
            [name for name in POLICIES["eviction"] if name.startswith("l")],
        ),
        ("moectl serve --residency ", list(POLICIES["residency"])),
        ("moectl run --budget 2", ["25%"]),
        ("moectl run --link d", ["disk", "direct"]),
        ("moectl run --scope l", ["layer"]),
        ("moectl run --experts f", ["fused"]),
        ("moectl run --device cu", ["cuda"]),
        ("moectl bench --presets near,on", ["near,on-demand"]),
        ("moectl bench --presets near,nea", []),
        (
            "moectl demo --scaled-to rtx3",
            ["rtx3060-12gb-pcie4", "rtx3080-pcie4", "rtx3090-pcie4"],
        ),
        ("moectl simulate --machine 5", ["5gbps"]),
        ("moectl plan mixtral-8x2", ["mixtral-8x22b"]),
    ],
)
def test_words(
    line: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in asked(line).items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    assert capsys.readouterr().out.split() == expected


def test_tab_imports_no_torch(tmp_path: Path) -> None:
    lines = [
        "moectl run --preset ",
        "moectl run --miss ",
        "moectl plan ",
        "moectl simulate --machine ",
    ]
    code = (
        "import os, sys\nfrom moectl.cli import main\nfor asked in "
        f"{[asked(line) for line in lines]!r}:\n    os.environ.update(asked)\n    assert main([]) "
        "== 0\nprint('heavy:', [name for name in ('torch', 'transformers', 'duckdb', 'numba') if "
        "name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("heavy: []\n") and "on-demand" in done.stdout
