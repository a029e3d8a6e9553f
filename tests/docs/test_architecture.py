"""docs/architecture.md and docs/concepts.md say what the code has: rooms, paths, addresses."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from moectl import cli
from moectl.commands import measure
from tests import ROOT
from tools.docs import house
from tools.docs.rooms import PACKAGES

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
GLOSSARY = (
    (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[2]
)
ADDRESSES = re.findall(r"\| `([\w.]+)` \|$", GLOSSARY, re.MULTILINE)


def test_the_table_of_rooms_and_the_picture_are_those_of_the_code() -> None:
    """Else: `python -m tools.docs.house --write docs/architecture.md`."""
    assert house.written(ARCHITECTURE) == ARCHITECTURE
    assert house.picture() == house.PICTURE.read_text(encoding="utf-8")


def test_paths_on_the_page_exist() -> None:
    paths = re.findall(
        rf"`((?:{'|'.join((*PACKAGES, 'tests', 'tools', 'docs'))})/[\w/.-]*)`", ARCHITECTURE
    )
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_command_of_the_page_is_found_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "commands" / "measure"
    folder.mkdir(parents=True)
    *_, code = re.findall(r"```python\n(.*?)```", ARCHITECTURE, re.DOTALL)
    (folder / "hello_world.py").write_text(code)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cli" / "__init__.py"))
    monkeypatch.setattr(measure, "__path__", [*measure.__path__, str(folder)])
    assert cli.main(["hello-world", "--store", "my.duckdb", "--json"]) == 0
    assert capsys.readouterr().out == '{"store": "my.duckdb"}\n'
    assert cli.main(["--help"]) == 0
    assert re.search(r"fit-trace .*\n.*hello-world +Greet\.", capsys.readouterr().out)


@pytest.mark.parametrize("address", sorted(set(ADDRESSES)))
def test_words_name_places_in_the_code(address: str) -> None:
    try:
        import_module(address)
    except ModuleNotFoundError:
        module, _, name = address.rpartition(".")
        assert hasattr(import_module(module), name)


def test_no_word_stands_twice() -> None:
    rows = re.findall(r"^\| ([^|`-][^|]*) \|", GLOSSARY, re.MULTILINE)
    words = [word.strip() for row in rows for word in row.split(",")]
    words = [word for word in words if word != "word"]
    assert len(words) > 50 and len(set(words)) == len(words)
