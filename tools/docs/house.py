"""The house as it stands: what each room is for, what it imports, how long its files and functions
are.

python -m tools.docs.house                                prints rooms and sizes; exits 1 where a limit is passed
python -m tools.docs.house --write docs/architecture.md   puts table and picture there: docs/pictures/house.svg
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT
from tools.docs.floor_plan import drawn
from tools.docs.rooms import PACKAGES, ROOMS, imports, modules, purpose, room_of

PICTURE = ROOT / "docs" / "pictures" / "house.svg"
# Limits in lines: of any file, of any function, of nine functions in ten of each package.
LONGEST_FILE = 450
LONGEST_FUNCTION = 60
LONG_FUNCTION = 20

_BEGIN = "<!-- rooms: -->\n"
_END = "<!-- :rooms -->"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lines of the files and functions of one package, each list ascending, with where they
    stand."""

    package: str
    files: list[tuple[int, str]]
    functions: list[tuple[int, str]]

    @property
    def p90(self) -> int:
        """Length that nine functions in ten do not exceed."""
        return self.functions[int(0.9 * len(self.functions))][0]

    @property
    def median(self) -> int:
        return self.functions[len(self.functions) // 2][0]

    def problems(self) -> list[str]:
        """A line for each limit that is passed."""
        limits = ((self.files, LONGEST_FILE), (self.functions, LONGEST_FUNCTION))
        found = [
            f"{where}: {n} lines, more than {most}"
            for places, most in limits
            for n, where in places
            if n > most
        ]
        if self.p90 > LONG_FUNCTION:
            found.append(
                f"{self.package}: nine functions in ten reach {self.p90} lines, more than "
                f"{LONG_FUNCTION}"
            )
        return found


def sizes(package: str) -> Sizes:
    """Count the lines of a package; a function counts from its `def` to its end, docstring
    included."""
    files = []
    functions = []
    for name, path in modules(package):
        text = path.read_text(encoding="utf-8")
        files.append((len(text.splitlines()), name))
        functions += [
            (length, f"{name}.{function}") for function, length in _functions(ast.parse(text))
        ]
    return Sizes(package, sorted(files), sorted(functions))


def arrows(package: str) -> dict[str, set[str]]:
    """By room: the rooms of the same package that it really imports."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS[package]}
    for name, path in modules(package):
        room = room_of(name)[1]
        others = {room_of(one.target) for one in imports(name, path)}
        if room:
            found[room] |= {
                other for owner, other in others if owner == package and other not in ("", room)
            }
    return found


def table() -> str:
    """The rooms of each package as Markdown, the outermost first."""
    lines = []
    for package in reversed(PACKAGES):
        lines += [
            f"**`{package}/`** {_sentence(package)}",
            "",
            "| room | what it is for |",
            "|---|---|",
        ]
        lines += [f"| `{room}` | {purpose(package, room)} |" for room in reversed(ROOMS[package])]
        lines.append("")
    return "\n".join(lines)


def picture() -> str:
    """The floor plan as SVG: packages, rooms and the imports between them."""
    return drawn({package: arrows(package) for package in PACKAGES})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the house, or write it into a page; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, help="the page that has a place for the table of rooms"
    )
    page = parser.parse_args(arguments).write
    if page:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        PICTURE.write_text(picture(), encoding="utf-8")
        return 0
    for package in PACKAGES:
        _show(package)
    every = [sizes(package) for package in PACKAGES]
    for one in every:
        lines, file = one.files[-1]
        length, function = one.functions[-1]
        print(
            (
                f"{one.package}: functions p50 {one.median}, p90 {one.p90}, longest {length} "
                f"({function}); "
            ),
            end="",
        )
        print(f"{len(one.files)} files, longest {lines} ({file})")
    problems = [problem for one in every for problem in one.problems()]
    print("\n".join(problems) or "every limit holds")
    return 1 if problems else 0


def written(text: str) -> str:
    """The page with the table of rooms as it is now."""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, f"the page needs the lines {_BEGIN.strip()} and {_END}"
    return f"{head}{begin}\n{table()}\n{end}{tail}"


def _sentence(package: str) -> str:
    text = (
        ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")))
        or ""
    )
    return text.split("\n\n")[0].replace("\n", " ")


def _show(package: str) -> None:
    print(f"{package}/")
    inside = arrows(package)
    for room in reversed(ROOMS[package]):
        own = [path for name, path in modules(package) if room_of(name)[1] == room]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own)
        imported = " ".join(sorted(inside[room])) or "no other room"
        print(f"  {room:13} {len(own):3} modules {lines:6,} lines   {purpose(package, room)}")
        print(f"  {'':13} imports {imported}")
    print()


def _functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            yield node.name, node.end_lineno - node.lineno + 1


if __name__ == "__main__":
    sys.exit(main())
