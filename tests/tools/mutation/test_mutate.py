"""The tool runs what was changed, also where code is usually compiled; its page keeps the
reasons."""

import subprocess
import sys

import pytest

from tests import ROOT
from tools.mutation.mutants import Mutant
from tools.mutation.mutate import TESTS, UNKNOWN, Outcome, page_of

pytestmark = pytest.mark.slow


def test_a_change_is_noticed_and_no_change_is_not() -> None:
    """One plain and one compiled function, by hand; in a process of its own, where nothing is
    compiled."""
    code = """
from tools import ROOT
from tools.mutation.mutants import Mutant, is_killed
for path, test, before, after in (
    (
        "runtime/policies/eviction/lru.py",
        "tests/runtime/policies/test_evictions.py::test_what_was_never_used_leaves_before_what_was_used_first_of_all",
        "return (self._last_use",
        "return (-self._last_use",
    ),
    (
        "artifacts/splits/kernels.py",
        "tests/artifacts/splits/test_solve.py::test_each_transfer_has_its_latency",
        "), 2.0 if",
        "), 1.0 if",
    ),
):
    source = (ROOT / path).read_text()
    for changed in (source, source.replace(before, after)):
        print(is_killed(Mutant(path, 1, "by hand", changed), [test], limit_s=60))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["False", "True", "False", "True"], done.stderr


def test_the_page_keeps_its_reasons() -> None:
    two = (Mutant("a.py", 3, "x | y -> x & y", ""), Mutant("a.py", 2, "a < b -> a <= b", ""))
    page = page_of([Outcome("a.py", 8, two, 8)], "# Title\n\nText.\n")
    assert page.startswith("# Title\n\nText.\n") and "| a.py | 8 | 6 | 2 | 75.0 |" in page
    assert page.count(UNKNOWN) == 2
    known = page.replace(f"`x ∣ y` → `x & y` | {UNKNOWN}", "`x ∣ y` → `x & y` | never both")
    moved = (Mutant("a.py", 9, "x | y -> x & y", ""), two[1])
    again = page_of([Outcome("a.py", 8, moved, 20)], known)
    assert "| 9 | `x ∣ y` → `x & y` | never both |" in again and again.count(UNKNOWN) == 1
    assert "| a.py | 8 of 20 | 6 | 2 | 75.0 |" in again, "a sample says so"


@pytest.mark.parametrize("path", TESTS)
def test_the_table_names_files_and_tests_that_exist(path: str) -> None:
    assert (ROOT / path).is_file()
    for test in TESTS[path]:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")
