"""The house as it stands: what each room is for, what it imports, how long its files and functions
are.

python -m tools.docs.house                                prints it; exits 1 where a limit is passed
python -m tools.docs.house --write docs/architecture.md   puts the table there, and draws the picture
"""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import ROOT
from tools.arguments import parser_of
from tools.docs.budget import measured
from tools.docs.floor_plan import drawn
from tools.docs.rooms import PACKAGES, ROOMS, imports, modules, purpose, room_of

PICTURE = ROOT / "docs" / "pictures" / "house.svg"
_BEGIN = "<!-- rooms: -->\n"
_END = "<!-- :rooms -->"


def arrows(package: str) -> dict[str, set[str]]:
    """Return for each room the rooms of the same package that it really imports."""
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
    parser = parser_of(__doc__, write=(Path, "the page that has a place for the table of rooms"))
    page = parser.parse_args(arguments).write
    if page:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        PICTURE.write_text(picture(), encoding="utf-8")
        return 0
    for package in PACKAGES:
        _show(package)
    size = measured()
    print(size)
    problems = size.problems()
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


if __name__ == "__main__":
    sys.exit(main())
