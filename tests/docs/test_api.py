"""docs/api.md is true: its blocks run one after another as the cells of a notebook, its signatures
and those of docs/lab/api.md are the code's, and programs and type checkers find the names that it promises."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
from numpy.typing import ArrayLike

import runtime
from moectl.cli import main
from tests import ROOT
from tests.docs.test_commands import shorter

PAGE = ROOT / "docs" / "api.md"
FUNCTIONS = ROOT / "docs" / "lab" / "api.md"
CELL = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SIGNATURE = re.compile(
    r"^((?:moectl|runtime|artifacts)\.[\w.]+)(\(.*?\)) -> (\S.*?)$", re.MULTILINE | re.DOTALL
)
PACKAGES = ("artifacts", "runtime", "profilers", "moectl")


def cells() -> list[tuple[str, str]]:
    return CELL.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOECTL_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.mark.usefixtures("elsewhere")
def test_the_cells_of_the_page_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    run = cells()
    assert any(language == "python" for language, _ in run)
    for language, text in run:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
            continue
        for line in text.splitlines():
            assert main(shorter(line).split()[1:]) == 0, line
    assert "hit rate 0." in capsys.readouterr().out


def signatures() -> dict[str, str]:
    """The signatures of both pages by name, each on one line."""
    text = PAGE.read_text(encoding="utf-8") + FUNCTIONS.read_text(encoding="utf-8")
    signatures = {name: f"{taken} -> {given}" for name, taken, given in SIGNATURE.findall(text)}
    return {name: " ".join(text.split()) for name, text in signatures.items()}


def signature_in_code(name: str) -> str:
    """The code's signature as the page writes it: without modules, and for a class that of its
    constructor."""
    parts = name.split(".")
    depth = max(depth for depth in range(1, len(parts)) if _is_module(".".join(parts[:depth])))
    thing: object = import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        thing = getattr(thing, part)
    signature = inspect.signature(thing)
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.name != "self"
    ]
    given = thing if inspect.isclass(thing) else signature.return_annotation
    text = str(signature.replace(parameters=parameters, return_annotation=given))
    text = text.replace(inspect.formatannotation(ArrayLike), "ArrayLike")
    text = re.sub(r"(-> |: )'([\w.]+)'", r"\1\2", text).replace("<factory>", "{}").replace("'", '"')
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text)


def _is_module(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("name", signatures())
def test_a_signature_is_the_codes(name: str) -> None:
    assert signatures()[name] == signature_in_code(name)


def test_every_public_name_is_on_the_page() -> None:
    """And the package offers it, to programs and to type checkers."""
    assert {name.split(".")[1] for name in signatures() if name.startswith("runtime.")} >= {
        *runtime.__all__
    }
    assert (
        {getattr(runtime, name).__name__ for name in runtime.__all__}
        == {*runtime.__all__}
        == {*dir(runtime)}
    )
    tree = ast.parse(Path(runtime.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == {name: getattr(runtime, name).__module__ for name in runtime.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'Sesion'"):
        runtime.Sesion  # noqa: B018


@pytest.mark.parametrize(
    "imported", ["import runtime.policies", "from runtime import Settings; Settings('fmoe')"]
)
def test_policies_and_settings_import_no_torch(imported: str) -> None:
    code = (
        f"import sys; {imported}; print(sorted({{'torch', 'transformers', 'duckdb'}} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert files(package).joinpath("py.typed").is_file()
