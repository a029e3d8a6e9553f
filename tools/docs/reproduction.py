"""Writes docs/lab/reproduction.md: every figure of a paper that our inputs suffice for.

python -m tools.docs.reproduction --traces FOLDER            all of `moectl simulate --reproduce`
python -m tools.docs.reproduction --traces FOLDER NAME ...   those anew, the others as they are

All of it takes ten minutes of a core. FOLDER has the recorded traces that docs/traces.md tells of;
without it, what needs one of them is left out.
"""

import re
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from artifacts.common.files import replacing
from moectl.show.render import Sheet, cell_text
from tools import ROOT
from tools.arguments import parser_of
from tools.reproductions.command import REPRODUCTIONS
from tools.reproductions.report import Reproduction
from tools.reproductions.shown import SHOWN

PAGE = ROOT / "docs" / "lab" / "reproduction.md"
_PART = re.compile(r"^## `(.+?)`$", re.MULTILINE)
_COUNTED = re.compile(r"\*\*(\d+) of (\d+) measured statements agree; beside them (.+?)\.\*\*")
# By reproduction, the recorded trace of its paper's model or of one that the paper measures.
_MIXTRAL = "mixtral-8x7b-humaneval-gsm8k.parquet"
TRACES = {
    "moepic-table1": "qwen1.5-moe-a2.7b-gsm8k-5layers.parquet",
    "moepic": _MIXTRAL,
    "specmd": _MIXTRAL,
    "buddymoe": _MIXTRAL,
    "context-aware": _MIXTRAL,
}
_HEAD = """\
# Reproduction: the papers' figures beside ours

What each paper shows, by what is measured here:

{shown}

All of it is measured in moectl's simulator: on recorded routing of real models where there is such, else on the small
bundled model or on synthetic traces, and on virtual time, never on the papers' hardware. Compare orders and ratios.

{table}

**Measured** is the outcome of a replay that could have been otherwise; these alone are counted. Each stands beside
its null test, the same test with the mechanism switched off, which has to fail: where it passes too, the statement is
**not told apart**. The spread is over three seeds, over thirds of a trace's requests, or 95 % of 1,000 resamplings of
them; the mean decides. **Derived** is arithmetic on printed numbers, or true of any routing; **fitted** is decided by
a number that was fitted to the paper. A statement **does not follow** if the paper's own numbers rule it out, with
the arithmetic beside it; it is **not determined** if it depends on what the paper does not print, and **not testable
here** if it takes what is not here. Figures of a paper that were not available are marked and not guessed.

Some statements four minutes of a GPU would settle, stage 7 of `tools.gpu.session`: whether prefetching hides loads
behind compute, what a stand-in for every miss takes, experts cut in two against whole ones, and the first token with
Least-Stale and with LRU. It has not run on a GPU.

`python -m tools.docs.reproduction --traces FOLDER` writes this page from `moectl simulate --reproduce`; only the
sentences at its top are typed by hand.

"""


def main(names: Sequence[str], traces: Path | None = None) -> None:
    """Run what is named, or everything, and write the page."""
    parts = written(PAGE.read_text(encoding="utf-8")) if names and PAGE.exists() else {}
    for name in names or REPRODUCTIONS:
        begin_s = time.perf_counter()
        trace = traces / TRACES[name] if traces and name in TRACES else None
        parts[name] = part(REPRODUCTIONS[name](trace), name, trace)
        print(f"{name}: {time.perf_counter() - begin_s:.0f} s")
    with replacing(PAGE) as temporary:
        temporary.write_text(
            page({name: parts[name] for name in REPRODUCTIONS if name in parts}), encoding="utf-8"
        )


def page(parts: dict[str, str]) -> str:
    rows = [["paper", "measured statements that agree", "beside them"], ["---"] * 3]
    totals: Counter[str] = Counter()
    for name, text in parts.items():
        agreed, measured, others = _COUNTED.search(text).groups()
        totals += Counter(agreed=int(agreed), measured=int(measured)) + _counts(others)
        rows.append([f"[{name}](#{name})", f"{agreed} of {measured}", others])
    share = (
        f"{totals['agreed']} of {totals['measured']}, {totals['agreed'] / totals['measured']:.0%}"
    )
    others = ", ".join(
        f"{totals[what]} {what}" for what in sorted(totals.keys() - {"agreed", "measured"})
    )
    rows.append(["all", share, others])
    shown = "\n".join(
        textwrap.fill(f"- **{paper}**: {text}", 118, subsequent_indent="  ")
        for paper, text in SHOWN.items()
    )
    head = _HEAD.format(shown=shown, table="\n".join(map(_line, rows)))
    return head + "\n".join(f"## `{name}`\n\n{text}" for name, text in parts.items())


def _counts(text: str) -> Counter[str]:
    """Counts by what follows them, of a text as `5 derived, 1 does not follow`."""
    pairs = re.findall(r"(\d+) ([a-z ]+)", text)
    return Counter({what: int(count) for count, what in pairs})


def written(text: str) -> dict[str, str]:
    """Return the parts that `page` was made of, by name."""
    _, *pieces = _PART.split(text)
    return {name: f"{body.strip()}\n" for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


def part(found: Reproduction, name: str, trace: Path | None = None) -> str:
    """One paper: statements and verdicts first, then tables, then what was assumed."""
    given = f" --trace {trace.name}" if trace else ""
    lines = [
        f"{found.paper}. `moectl simulate --reproduce {name}{given}`",
        "",
        f"**{found.counted}.** Of the paper are available here: {found.available}.",
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
    options = parser_of(__doc__, traces=(Path, "folder of recorded traces"))
    options.add_argument("names", nargs="*", help="reproductions, by default all")
    chosen = options.parse_args()
    main(chosen.names, chosen.traces)
