"""Tables of measurements on a page, and the committed ratios that later measurements are compared
with."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from artifacts.errors import BadInput
from artifacts.store.runs import versions
from profilers.hardware.this_machine import LocalMachine

_PACKAGES = ("python", "torch", "transformers", "numpy")
_LEAST_SPREAD = 0.05  # two runs of the same code on a quiet machine differ by this much


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median and quartiles of a ratio over rounds; less is better."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> "Ratio":
        """The ratio of two series, round by round."""
        ratios = [one / beside for one, beside in zip(own, other, strict=True)]
        lower, median, upper = np.percentile(ratios, [25, 50, 75]).tolist()
        return cls(median, lower, upper)

    @property
    def spread(self) -> float:
        """Allowed relative increase of a later measurement: the quartile distance, at least 5 %."""
        return max(self.upper - self.lower, _LEAST_SPREAD * self.median)

    def cells(self) -> tuple[str, str]:
        return f"{self.median:.3f}", f"{self.lower:.3f} to {self.upper:.3f}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table; `ratios` are stored under their names for later comparison."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple]
    note: str
    ratios: Mapping[str, Ratio] = field(default_factory=dict)

    def markdown(self) -> str:
        cells = [self.columns, ["---"] * len(self.columns), *self.rows]
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in cells]
        return "\n".join([f"**{self.title}**", "", *lines, "", f"{self.note}."])


@dataclass(frozen=True, slots=True)
class Section:
    """The measurements of one section; the page has a place for it by `name`."""

    name: str
    tables: Sequence[Table]

    @property
    def ratios(self) -> dict[str, Ratio]:
        return {
            f"{self.name}: {name}": ratio
            for table in self.tables
            for name, ratio in table.ratios.items()
        }


def conditions(command: str) -> str:
    """Machine, versions, commit and command in one line."""
    here = LocalMachine.look(torch.device("cpu"))
    known = versions()
    load = "" if here.load is None else f", load {here.load:.1f}"
    packages = ", ".join(f"{name} {known[name]}" for name in _PACKAGES)
    return (
        f"`{command}`, seed 0, commit {_commit()}; {here.cores} CPU cores ({here.processor}), "
        f"{here.threads} torch thread, {here.memory_nbytes / 2**30:.0f} GiB{load}; {packages}"
    )


def write(page: Path, sections: Sequence[Section], told: str) -> None:
    """Write each section between its marks in `page`, `told` below it, and its ratios into the file
    beside the page.

    Raises BadInput for a page without the marks.
    """
    check_places(page, [section.name for section in sections])
    text = page.read_text()
    for section in sections:
        text = _between(text, section, told)
    page.write_text(text)
    kept = read_ratios(page) if ratios_of(page).exists() else {}
    names = {section.name for section in sections}
    kept = {name: ratio for name, ratio in kept.items() if name.partition(":")[0] not in names}
    for section in sections:
        kept |= section.ratios
    if not kept and not ratios_of(page).exists():
        return
    rounded = {
        name: {key: round(value, 4) for key, value in asdict(kept[name]).items()}
        for name in sorted(kept)
    }
    ratios_of(page).write_text(json.dumps(rounded, indent=1) + "\n")


def publish(section: Section, page: Path | None, command: str) -> None:
    """Print the tables of a section, and write them into `page` if there is one."""
    for table in section.tables:
        print(table.markdown(), flush=True)
    if page:
        write(page, [section], conditions(command))


def ratios_of(page: Path) -> Path:
    """The file of the ratios of a page."""
    return page.with_suffix(".json")


def read_ratios(page: Path) -> dict[str, Ratio]:
    """Read the ratios of a page. Raises BadInput if there are none."""
    try:
        return {name: Ratio(**own) for name, own in json.loads(ratios_of(page).read_text()).items()}
    except (OSError, ValueError, TypeError) as problem:
        raise BadInput(f"{ratios_of(page)} holds no ratios to compare with: {problem}") from problem


def worse(found: Mapping[str, Ratio], committed: Mapping[str, Ratio]) -> list[str]:
    """A line for each ratio that exceeds the committed one by more than its spread; new ratios are
    skipped."""
    return [
        f"{name}: {own.median:.3f}, committed {then.median:.3f} with a spread of {then.spread:.3f}"
        for name, own in found.items()
        if (then := committed.get(name)) and own.median > then.median + then.spread
    ]


def check_places(page: Path, names: Iterable[str]) -> None:
    """Raise BadInput for a page without the marks of a section: better before hours of measuring
    than behind them."""
    text = page.read_text()
    for name in names:
        begin, end = _marks(name)
        if begin not in text or end not in text:
            raise BadInput(
                f"{page} has no place for {name}: put {begin.strip()} and {end} there, a line each"
            )


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: -->\n", f"<!-- :{name} -->"


def _between(text: str, section: Section, told: str) -> str:
    begin, end = _marks(section.name)
    tables = "\n\n".join(table.markdown() for table in section.tables)
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{tables}\n\n{told}.\n\n{end}{rest.partition(end)[2]}"


def _commit() -> str:
    """The commit of this repository, with a plus if there are uncommitted changes."""
    folder = Path(__file__).parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.strip()
