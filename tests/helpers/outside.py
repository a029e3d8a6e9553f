"""Another package, installed in a folder: its one file and its entry point, as a page shows them."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from artifacts.common.outside import installed
from tests import ROOT


def shown(page: str) -> tuple[str, str]:
    """Return the file and the entry point that a page of the documents shows."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (file, *_), (named,) = (
        re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for language in ("python", "toml")
    )
    return file, named


@contextmanager
def package(folder: Path, module: str, file: str, named: str) -> Iterator[None]:
    """Install a package of one module in `folder` and be there until the end."""
    (folder / f"{module}.py").write_text(file, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    group, line = re.fullmatch(r'\[project\.entry-points\."(.+)"\]\n(.+)\n', named).groups()
    (info / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        installed.cache_clear()
        yield
    sys.modules.pop(module, None)
    installed.cache_clear()
