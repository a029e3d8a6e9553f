"""The result of a reproduction: tables, the paper's claims beside our figures, and assumptions."""

from dataclasses import dataclass

from moectl.show.render import Sheet
from tools.reproductions.reasons import REASONS

UNKNOWN = "not available here"
DOES_NOT_FOLLOW = "does not follow"
NOT_DETERMINED = "not determined"
NOT_TESTABLE = "not testable here"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper and our figure; `holds` is None where the two cannot be compared, and
    `otherwise` is the verdict then.

    By default the verdict is that the paper's figure is not available. The others are: the claim
    does not follow from what else the paper publishes, and `ours` is the arithmetic; it depends on
    something that the paper does not print, which `ours` names; or it cannot be tested here, and
    `ours` is what a test would take.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None
    otherwise: str = "cannot be said"

    @property
    def verdict(self) -> str:
        return self.otherwise if self.holds is None else "agrees" if self.holds else "DISAGREES"


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
        """Text with the number of the paper's figures and claims that were available for
        comparison."""
        figures = [
            row["paper"]
            for sheet in self.sheets.values()
            for row in sheet.records()
            if row.get("paper") is not None
        ]
        had = sum(figure != UNKNOWN for figure in figures)
        claims = sum(claim.holds is not None for claim in self.claims)
        return (
            f"{had} of the {len(figures)} figures that its tables ask for, and {claims} "
            "statements; nothing is guessed"
        )

    def reasons(self) -> list[str]:
        """Return why statements disagree: a line for each reason, after the claims that it
        explains."""
        apart = [claim.text for claim in self.claims if claim.holds is False]
        lines = []
        for reason in REASONS.get(self.name, ()):
            if of := [text for text in apart if text.startswith(reason.claims)]:
                lines.append(f"{'; '.join(of)}: {reason.why}")
        return lines

    def claim_sheet(self) -> Sheet:
        rows = [(claim.text, claim.paper, claim.ours, claim.verdict) for claim in self.claims]
        return Sheet(self.paper, ("claim", "paper", "ours", "verdict"), rows)


def known(value: float | None) -> float | str:
    """A figure of the paper, or the text that it is not available."""
    return UNKNOWN if value is None else value
