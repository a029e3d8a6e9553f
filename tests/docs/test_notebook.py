"""docs/notebook.ipynb is a notebook without outputs, and its cells run one after another."""

import ast
import json

import pytest

from tests import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_has_no_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    kept = [
        cell for cell in NOTEBOOK["cells"] if cell.get("outputs") or cell.get("execution_count")
    ]
    assert kept == [] and len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_its_cells_run_and_show_tables(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    shown = []
    for text in CODE:
        *lines, last = ast.parse(text).body
        is_shown = isinstance(last, ast.Expr)
        body = lines if is_shown else [*lines, last]
        exec(compile(ast.Module(body, []), "notebook", "exec"), names)
        if is_shown:
            value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
            shown.append(getattr(value, "_repr_html_", str)())
    assert sum("<table" in each for each in shown) == 5
    assert "ms a token, hit rate 0." in capsys.readouterr().out
    rates = names["replayed"].to_pandas().set_index("label")["hit_rate"]
    assert rates["belady"] == rates.max()
