"""The bench of two checkouts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tools.bench.checkouts import SETTINGS
from tools.bench.measuring import process_environment

pytestmark = pytest.mark.slow


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.bench.checkouts", *arguments]
    environment = process_environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_checkout_beside_itself_has_a_ratio_in_each_setting() -> None:
    done = bench(str(ROOT), "--tokens", "2")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(.+), (.+): ([\d.]+) of the old one's time", done.stdout, re.MULTILINE)
    assert [(preset, experts) for preset, experts, _ in found] == list(SETTINGS)
    assert all(float(ratio) > 0 for *_, ratio in found)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = bench(str(tmp_path))
    assert done.returncode == 2
    assert "is no checkout of this repository" in done.stderr
