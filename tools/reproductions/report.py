"""The result of a reproduction: tables, the paper's claims beside our figures, and assumptions."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from moectl.show.render import Sheet
from tools.reproductions.reasons import REASONS

UNKNOWN = "not available here"
AGREES = "agrees"
DISAGREES = "DISAGREES"
DOES_NOT_FOLLOW = "does not follow"
NOT_DETERMINED = "not determined"
NOT_TESTABLE = "not testable here"
NOT_SAID = "cannot be said"
NOT_APART = "not told apart"


class Kind(StrEnum):
    """The class of a statement: the outcome of a replay that could have been otherwise; arithmetic
    on printed numbers, or true of any routing; decided by a number that was fitted to the paper; or
    none, where nothing here tests it."""

    MEASURED = "measured"
    DERIVED = "derived"
    FITTED = "fitted"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Null:
    """The same test with the mechanism switched off: what is off or in its place, what it comes to,
    and whether the test still passes, which it must not."""

    off: str
    ours: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.off}: {self.ours}, {'PASSES' if self.holds else 'fails'}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper and our figure; `holds` is None where the two cannot be compared, and
    `otherwise` is the verdict then.

    A measured claim has its null test and its `spread`: over seeds of a synthetic trace, or over
    resampled requests of a recorded one. It is not told apart where the null test passes as well.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None
    kind: Kind
    otherwise: str = NOT_SAID
    null: Null | None = None
    spread: str = ""

    def __post_init__(self) -> None:
        is_measured = self.kind is Kind.MEASURED
        assert is_measured == (self.null is not None) == bool(self.spread), self.text
        assert self.kind is not Kind.LEFT_OUT or self.holds is None, self.text

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return self.otherwise
        if not self.holds:
            return DISAGREES
        return NOT_APART if self.null and self.null.holds else AGREES


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A reproduced paper; `sheets` by their key in JSON."""

    name: str
    paper: str
    sheets: dict[str, Sheet]
    claims: tuple[Claim, ...]
    assumed: tuple[str, ...]

    @property
    def available(self) -> str:
        """Text with the number of the paper's figures that were available for comparison."""
        figures = [
            row["paper"]
            for sheet in self.sheets.values()
            for row in sheet.records()
            if row.get("paper") is not None
        ]
        had = sum(figure != UNKNOWN for figure in figures)
        return f"{had} of the {len(figures)} figures that its tables ask for; nothing is guessed"

    @property
    def counted(self) -> str:
        """Text with how many measured statements agree, and how many there are of every other
        class and verdict."""
        measured = [claim.verdict for claim in self.claims if claim.kind is Kind.MEASURED]
        others = Counter(
            str(claim.kind) if claim.holds is not None else claim.verdict
            for claim in self.claims
            if claim.kind is not Kind.MEASURED
        )
        told = ", ".join(f"{count} {what}" for what, count in sorted(others.items()))
        agreed = f"{measured.count(AGREES)} of {len(measured)} measured statements agree"
        return f"{agreed}; beside them {told or 'none'}"

    def reasons(self) -> list[str]:
        """Return why statements disagree: a line for each reason, after the claims that it
        explains."""
        apart = [claim.text for claim in self.claims if claim.verdict in (DISAGREES, NOT_APART)]
        lines = []
        for reason in REASONS.get(self.name, ()):
            if of := [text for text in apart if text.startswith(reason.claims)]:
                lines.append(f"{'; '.join(of)}: {reason.why}")
        return lines

    def claim_sheet(self) -> Sheet:
        rows = [
            (claim.text, claim.paper, claim.ours, claim.spread or "-")
            + (str(claim.null or "-"), str(claim.kind), claim.verdict)
            for claim in self.claims
        ]
        columns = ("claim", "paper", "ours", "spread", "switched off", "class", "verdict")
        return Sheet(self.paper, columns, rows)


def known(value: float | None) -> float | str:
    """A figure of the paper, or the text that it is not available."""
    return UNKNOWN if value is None else value
