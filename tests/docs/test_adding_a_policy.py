"""The example of docs/architecture.md works as it is written: the file, the line of the table,
the golden row."""

import json
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import BadUsage
from runtime.policies import POLICIES, describe, parse
from tests import ROOT
from tests.runtime.policies.contract import Case, keep_the_contract, routed, run
from tools.make import golden

PAGE = ROOT / "docs" / "architecture.md"
FILE, LINE, _ = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module", autouse=True)
def added() -> Iterator[None]:
    """The file is imported, and the line stands in the table, as long as these tests run."""
    module = module_from_spec(ModuleSpec("runtime.policies.eviction.lru_k", loader=None))
    sys.modules[module.__name__] = module
    exec(compile(FILE, str(PAGE), "exec"), module.__dict__)
    POLICIES["eviction"] |= eval("{" + LINE + "}", module.__dict__)
    yield
    del POLICIES["eviction"]["lru_k"], sys.modules[module.__name__]


def test_the_line_makes_it_known_with_its_parameters() -> None:
    assert describe(parse("eviction", "lru_k:k=3")) == "lru_k:k=3"
    with pytest.raises(BadUsage, match="k >= 1"):
        parse("eviction", "lru_k:k=0")


@given(routed(), st.data())
@settings(max_examples=40)
def test_it_keeps_the_contract(case: Case, data: st.DataObject) -> None:
    others = {
        axis: data.draw(st.sampled_from(list(table)), axis) for axis, table in POLICIES.items()
    }
    keep_the_contract(case, **others | {"eviction": "lru_k"})


@given(routed())
@settings(max_examples=40)
def test_with_one_use_it_is_lru(case: Case) -> None:
    assert (
        run(case, eviction="lru_k:k=1").counters.totals()
        == run(case, eviction="lru").counters.totals()
    )


def test_the_tool_adds_its_row_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = golden.GOLDEN.read_text(encoding="utf-8")
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden.json")
    golden.GOLDEN.write_text(before, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["golden", "eviction/lru_k"])
    golden.main()
    rows = json.loads(golden.GOLDEN.read_text(encoding="utf-8"))
    assert {name: row for name, row in rows.items() if name != "eviction/lru_k"} == json.loads(
        before
    )
    assert len(rows["eviction/lru_k"]["layer"]) == 8
