"""Writes docs/lab/reproduction.md: every figure of a paper that our inputs suffice for, beside ours.

python -m tools.docs.reproduction            all of `moectl simulate --reproduce`, which takes minutes
python -m tools.docs.reproduction NAME ...   those anew, the others as the page has them
"""

import re
import sys
import time
from collections.abc import Sequence

from artifacts.common.files import replacing
from moectl.show.render import Sheet, cell_text
from tools import ROOT
from tools.reproductions.command import REPRODUCTIONS
from tools.reproductions.report import Reproduction

PAGE = ROOT / "docs" / "lab" / "reproduction.md"
_PART = re.compile(r"^## `(.+?)`$", re.MULTILINE)
_AGREED = re.compile(r"\*\*(\d+) of (\d+) statements agree")
_HEAD = """\
# Reproduction: the papers' figures beside ours

For each paper below, which of its statements hold in moectl's simulator and which do not, figure by figure. All figures
of ours are simulated, on virtual time, from synthetic traces or those of the small bundled model, none on the papers'
hardware: compare orders and ratios. Where we disagree, the verdict says DISAGREES, and the reasons stand below the
verdicts. A statement **does not follow** if the paper's own numbers rule it out: the arithmetic stands beside it. It is
**not determined** if it depends on what the paper does not print, which stands there too.
Figures of a paper that were not available are marked and not guessed.

`python -m tools.docs.reproduction` writes this page from `moectl simulate --reproduce`; nothing is typed by hand.

"""


def main(names: Sequence[str]) -> None:
    """Run what is named, or everything, and write the page."""
    parts = written(PAGE.read_text(encoding="utf-8")) if names and PAGE.exists() else {}
    for name in names or REPRODUCTIONS:
        begin_s = time.perf_counter()
        parts[name] = part(REPRODUCTIONS[name](), name)
        print(f"{name}: {time.perf_counter() - begin_s:.0f} s")
    with replacing(PAGE) as temporary:
        temporary.write_text(
            page({name: parts[name] for name in REPRODUCTIONS if name in parts}), encoding="utf-8"
        )


def page(parts: dict[str, str]) -> str:
    agreed = {name: _AGREED.search(text) for name, text in parts.items()}
    rows = [
        _line([f"[{name}](#{name})", f"{found[1]} of {found[2]}"]) for name, found in agreed.items()
    ]
    of_all = [sum(int(found[place]) for found in agreed.values()) for place in (1, 2)]
    rows.append(_line(["all", f"{of_all[0]} of {of_all[1]}, {of_all[0] / of_all[1]:.0%}"]))
    table = "\n".join([_line(["paper", "statements that agree"]), _line(["---"] * 2), *rows])
    return f"{_HEAD}{table}\n\n" + "\n".join(
        f"## `{name}`\n\n{text}" for name, text in parts.items()
    )


def written(text: str) -> dict[str, str]:
    """Return the parts that `page` was made of, by name."""
    _, *pieces = _PART.split(text)
    return {name: f"{body.strip()}\n" for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


def part(found: Reproduction, name: str) -> str:
    """One paper: statements and verdicts first, then tables, then what was assumed."""
    agreed = [claim.holds for claim in found.claims if claim.holds is not None]
    lines = [
        f"{found.paper}. `moectl simulate --reproduce {name}`",
        "",
        (
            f"**{sum(agreed)} of {len(agreed)} statements agree.** Of the paper are available "
            f"here: {found.available}."
        ),
        "",
        *markdown(found.claim_sheet(), heading=""),
    ]
    if reasons := found.reasons():
        lines += ["", "Why we disagree:", "", *(f"- {line}" for line in reasons)]
    for sheet in found.sheets.values():
        lines += ["", *markdown(sheet, heading=sheet.title)]
    lines += ["", "Assumed:", "", *(f"- {line}" for line in found.assumed), ""]
    return "\n".join(lines)


def markdown(sheet: Sheet, *, heading: str) -> list[str]:
    """A table, below its title."""
    rows = [[_cell(value) for value in row] for row in sheet.rows]
    above = [f"**{heading}**", ""] if heading else []
    below = ["", sheet.note] if sheet.note else []
    table = [
        _line([_cell(name) for name in sheet.columns]),
        _line(["---"] * len(sheet.columns)),
        *map(_line, rows),
    ]
    return [*above, *table, *below]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return cell_text(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main(sys.argv[1:])
