"""What a reproduction has to say: tables, the paper's statements held against ours, and what was assumed."""

from dataclasses import dataclass

from moectl.show.render import Sheet

UNKNOWN = "not available here"


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper and what we find; `holds` is None where there is nothing to hold it against."""

    text: str
    paper: str
    ours: str
    holds: bool | None

    @property
    def verdict(self) -> str:
        return "cannot be said" if self.holds is None else "agrees" if self.holds else "DISAGREES"


@dataclass(frozen=True, slots=True)
class Reproduction:
    """`sheets` by the key they have in JSON."""

    name: str
    paper: str
    sheets: dict[str, Sheet]
    claims: tuple[Claim, ...]
    assumed: tuple[str, ...]

    @property
    def available(self) -> str:
        """How much of the paper our figures could be held against."""
        figures = [
            row["paper"] for sheet in self.sheets.values() for row in sheet.records() if row["paper"] is not None
        ]
        had = sum(figure != UNKNOWN for figure in figures)
        claims = sum(claim.holds is not None for claim in self.claims)
        return (
            f"{had} of the {len(figures)} figures that its tables ask for, and {claims} statements; nothing is guessed"
        )

    def claim_sheet(self) -> Sheet:
        rows = [(claim.text, claim.paper, claim.ours, claim.verdict) for claim in self.claims]
        return Sheet(self.paper, ("claim", "paper", "ours", "verdict"), rows)


def known(value: float | None) -> float | str:
    """A paper's figure, or that there is none to be had."""
    return UNKNOWN if value is None else value
