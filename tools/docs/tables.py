"""The table of the store's tables in docs/profile.md, from the schema; tools/docs/site.py makes a
page of every column.

python -m tools.docs.tables                          prints it
python -m tools.docs.tables --write docs/profile.md  puts it there
"""

import argparse
from pathlib import Path

from artifacts.store.schema import TABLES

_BEGIN = "<!-- tables: -->\n"
_END = "<!-- :tables -->"


def tables() -> str:
    """Return a row for each table: what it has one row for, and its columns."""
    lines = ["| table | one row per | columns |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {each.row} | `{', '.join(each.columns)}` |" for name, each in TABLES.items()
    ]
    return "\n".join(lines) + "\n"


def written_into(page: str) -> str:
    """Return the page with the table in its place."""
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, f"the page needs the lines {_BEGIN.strip()} and {_END}"
    return head + begin + tables() + end + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="PAGE")
    page = parser.parse_args().write
    if page is None:
        print(tables(), end="")
    else:
        page.write_text(written_into(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
