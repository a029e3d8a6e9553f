"""Random fault injection for a given number of minutes, and a report of broken promises.

    python -m tools.torments.torture --minutes 20                               every torment in turn, by its share
    python -m tools.torments.torture --minutes 20 --write docs/lab/reliability.md   puts the figures into that page
    python -m tools.torments.torture --only against_generate --cases 2000       so many cases of one torment
    python -m tools.torments.torture --only killed --case 17                    one case again

Each torment (tools/torments) runs in a process of its own, so that a crash, a hang or exhausted
memory counts as a loss and does not end the run. Exits 1 if anything was lost, and prints how to
repeat it.
"""

import argparse
import ast
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from moectl.show.render import Sheet, show_sheet
from tools import ROOT
from tools.arguments import parser_of
from tools.bench import performance
from tools.torments import cases
from tools.torments.cell import Case, Cell

FAULTS = ROOT / "tests" / "faults"


@dataclass(slots=True)
class Found:
    """The results of the cases of one torment."""

    name: str
    torment: type[cases.Torment]
    cases: list[Case] = field(default_factory=list)
    spent_s: float = 0.0
    peak_nbytes: int = 0

    def take(self, case: Case) -> None:
        self.cases.append(case)
        self.spent_s += case.seconds
        self.peak_nbytes = max(self.peak_nbytes, case.peak_nbytes)
        if case.loss:
            print(f"LOST {self.name} --case {case.number}: {case.loss}", file=sys.stderr)


def main() -> int:
    options = _options()
    found = [Found(name, cases.load(name)) for name in options.only]
    with tempfile.TemporaryDirectory(prefix="moectl-torture-") as ground:
        cells = {each.name: Cell(each.torment, Path(ground), options.seed) for each in found}
        try:
            _run(found, cells, options)
        except KeyboardInterrupt:
            print("interrupted: what follows is what was tried", file=sys.stderr)
        finally:
            for cell in cells.values():
                cell.close()
    return _report(found, options)


def _run(found: list[Found], cells: dict[str, Cell], options: argparse.Namespace) -> None:
    """Run next the torment that has had the least of its share."""
    if options.case is not None:
        found[0].take(cells[found[0].name].run(options.case))
        return
    end = time.monotonic() + 60 * options.minutes
    while len(found[0].cases) < options.cases if options.cases else time.monotonic() < end:
        next_one = min(found, key=lambda one: one.spent_s / one.torment.share)
        next_one.take(cells[next_one.name].run(len(next_one.cases)))


def _report(found: list[Found], options: argparse.Namespace) -> int:
    """Show the tables, and write them if asked; return 1 if anything was lost, else 0.

    With a number of cases, the table goes between the torment's own marks in the page.
    """
    by_torment = _by_torment(found, options.only[0] if options.cases else "torments")
    sections = [by_torment] if options.cases else [_by_class(found, options), by_torment]
    for section in sections:
        for table in section.tables:
            show_sheet(Sheet(table.title, table.columns, table.rows, table.note))
    if options.write:
        performance.write(options.write, sections, performance.conditions(_command()))
    return 1 if any(case.loss for one in found for case in one.cases) else 0


def _by_class(found: list[Found], options: argparse.Namespace) -> performance.Section:
    tried = Counter()
    lost = Counter()
    for one in found:
        for case in one.cases:
            number = cases.class_of(one.torment, case.loss or case.fault)
            tried[number] += 1
            lost[number] += bool(case.loss)
    rows = [
        (
            number,
            words,
            *(
                f"{count:,}"
                for count in (tried[number], tried[number] - lost[number], lost[number])
            ),
        )
        for number, words in _classes().items()
    ]
    columns = ("class", "what goes wrong", "tried", "survived", "lost")
    note = (
        f"seed {options.seed}, {options.minutes:g} minutes: {tried.total():,} cases, "
        f"{lost.total()} lost"
    )
    return performance.Section(
        "classes", [performance.Table("By class of fault", columns, rows, note)]
    )


def _by_torment(found: list[Found], name: str) -> performance.Section:
    rows = [
        (
            one.name,
            f"{len(one.cases):,}",
            len({case.fault for case in one.cases}),
            f"{one.spent_s:.0f}",
            f"{max((case.seconds for case in one.cases), default=0):.1f}",
            f"{one.peak_nbytes / 2**20:.0f}",
            ", ".join(str(case.number) for case in one.cases if case.loss) or "none",
        )
        for one in found
    ]
    columns = (
        "torment",
        "cases",
        "kinds of fault",
        "seconds",
        "slowest, s",
        "peak MiB",
        "lost cases",
    )
    note = (
        "a process each; a case is repeated by `python -m tools.torments.torture --only NAME "
        "--case N`"
    )
    return performance.Section(name, [performance.Table("By torment", columns, rows, note)])


def _classes() -> dict[int, str]:
    """A sentence on each class, by number: the first line of its file in tests/faults."""
    return {
        int(path.name.split("_")[1]): ast.get_docstring(ast.parse(path.read_text()))
        .partition("\n")[0]
        .rstrip(".")
        for path in sorted(FAULTS.glob("test_*.py"))
    }


def _command() -> str:
    return " ".join(["python -m tools.torments.torture", *sys.argv[1:]])


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        minutes=(1.0, "for all torments together"),
        seed=0,
        cases=(int, "so many cases of one torment, however long they take"),
        case=(int, "one case of one torment"),
        write=(Path, "put the figures into this page"),
    )
    parser.add_argument(
        "--only", nargs="+", choices=cases.names(), default=cases.names(), help="these torments"
    )
    options = parser.parse_args()
    if (options.cases or options.case is not None) and len(options.only) > 1:
        parser.error("--cases and --case are for one torment: name it by --only")
    return options


if __name__ == "__main__":
    sys.exit(main())
