"""Quick tests of the classes without a torment of their own, under other hash seeds, time zones and
locales."""

import os
import random
import subprocess
import sys
from pathlib import Path

from tools import ROOT
from tools.torments.cases import Lost

ZONES = ("UTC", "Asia/Kathmandu", "America/St_Johns", "Pacific/Chatham")
LOCALES = ("C", "C.UTF-8", "POSIX")


class Elsewhere:
    """Each case runs one file of tests/faults."""

    classes = (4, 10, 16, 19, 20, 22, 23, 24)
    share = 4.0

    def __init__(self, ground: Path) -> None:
        self._ground = ground

    def one(self, rng: random.Random) -> str:
        number = rng.choice(self.classes)
        (path,) = (ROOT / "tests" / "faults").glob(f"test_{number:02d}_*.py")
        zone = rng.choice(ZONES)
        locale = rng.choice(LOCALES)
        seed = rng.randrange(2**32)
        changed = {
            "TZ": zone,
            "LC_ALL": locale,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(path)]
        command.append(f"--basetemp={self._ground / 'tests'}")
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | changed, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Lost(f"{number}: {zone}, {locale}, hash seed {seed}: {done.stdout[-600:]}")
        return f"{number}: {zone}, {locale}"
