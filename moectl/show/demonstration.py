"""The result of `moectl demo`: a table, one sentence and a picture, all of the same rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moectl.charts.scales import Drawing, Frame, linear_scale, spanned
from moectl.charts.scatter import Mark, error_bar, loss_scale, scatter
from moectl.show.grounds import compared
from moectl.show.losses import is_distinguishable, loss_words
from moectl.show.render import Sheet, human_bytes
from runtime.control.counters import is_exact

WIDTH = 480  # of a picture
FULL = "full"
PLAIN = "on-demand"
KEY = {
    "full": "every expert in memory",
    "exact": "output exactly the same",
    "altered": "output altered",
}


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One preset at one budget on the held-out texts.

    `times_full` is the median over rounds of a token's time over the time of `full` in the same
    round; `lower` and `upper` are its quartiles. `altered` counts requests that were not computed
    as by the full model. `loss_error` is the standard error of `perplexity_ratio`.
    """

    preset: str
    budget: str
    hit_rate: float
    moved_bytes: int
    exposed_ms: float
    ms_per_token: float
    times_full: float
    lower: float
    upper: float
    perplexity_ratio: float
    kl: float
    top1_agreement: float
    altered: int
    loss_error: float | None = None

    @property
    def is_exact(self) -> bool:
        """True if the output is that of the full model."""
        return is_exact(self.altered)

    @property
    def loss(self) -> float:
        """Share of perplexity lost, negative for a gain."""
        return 0.0 if self.is_exact else self.perplexity_ratio - 1

    @property
    def is_distinguishable(self) -> bool:
        """True if the loss can be distinguished from zero."""
        return is_distinguishable(self.loss, self.loss_error)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The rows and the conditions they were measured under. `num_tokens` were decoded by each row;
    `grounds` says what its times rest on."""

    rows: list[DemoRow]
    budget: str
    num_tokens: int
    grounds: str
    conditions: str
    receipts: dict[str, dict[str, object]]

    def records(self) -> dict[str, object]:
        """The demonstration as JSON values."""
        rows = [
            asdict(row) | {"is_exact": row.is_exact, "is_distinguishable": row.is_distinguishable}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows, "seen": sentence(self)}

    def at_budget(self) -> list[DemoRow]:
        """The rows at the budget of the demonstration, without `full`."""
        return [row for row in self.rows if row.budget == self.budget and row.preset != FULL]


def sheet(demonstration: Demonstration) -> Sheet:
    """The table, exact rows first."""
    columns = ("preset", "held", "time, full = 1", "hit rate", "moved a token", "loss", "top-1")
    ordered = sorted(demonstration.rows, key=lambda row: not row.is_exact)
    rows = [
        (
            row.preset,
            row.budget,
            f"{row.times_full:.1f} ({row.lower:.1f} to {row.upper:.1f})",
            f"{row.hit_rate:.3f}",
            human_bytes(row.moved_bytes / demonstration.num_tokens),
            "exact" if row.is_exact else loss_words(row.loss, row.loss_error, digits=1),
            f"{100 * row.top1_agreement:.1f} %",
        )
        for row in ordered
    ]
    return Sheet(
        "The bundled model with too little memory",
        columns,
        rows,
        f"{demonstration.grounds}. {demonstration.conditions}",
    )


def sentence(demonstration: Demonstration) -> str:
    """Return a summary of the measurements in one sentence, from the rows alone."""
    rows = {row.preset: row for row in demonstration.at_budget()}
    exact = min((row for row in rows.values() if row.is_exact), key=lambda row: row.times_full)
    fastest = min(rows.values(), key=lambda row: row.times_full)
    plain = rows[PLAIN]
    said = (
        f"With {demonstration.budget} of the experts in fast memory, loading each missing expert "
        f"when it is wanted ({PLAIN}) was {_beside(plain, 'with all of them there')}"
    )
    if exact is not plain:
        said += (
            f"; the fastest way with the same output, {exact.preset}, was {_beside(exact, FULL)}"
        )
    if fastest is not exact:
        said += (
            f"; the fastest of all, {fastest.preset}, was {_beside(fastest, FULL)} and "
            f"{_cost(fastest)}"
        )
    return said + "."


def drawing(demonstration: Demonstration) -> Drawing:
    """Time against quality at the demonstration's budget, every preset named."""
    rows = [row for row in demonstration.rows if row.preset == FULL] + demonstration.at_budget()
    marks = [
        Mark(
            row.times_full,
            max(0.0, row.loss),
            row.preset,
            _kind(row),
            across=(row.lower, row.upper),
            upwards=error_bar(row.loss, row.loss_error),
        )
        for row in rows
    ]
    listed = "; ".join(f"{row.preset} {row.times_full:.1f}, {100 * row.loss:.1f} %" for row in rows)
    held = f"{demonstration.budget} of the experts"
    says = f", by preset: {listed}"
    return time_and_quality(
        marks, held=held, grounds=demonstration.grounds, says=says, height=310, most=1.1
    )


def time_and_quality(
    marks: Sequence[Mark], *, held: str, grounds: str, says: str, height: float, most: float
) -> Drawing:
    """Draw times over those of the full model against quality, with `held` in fast memory; times
    go up to `most` times the longest. `says` is what screen readers are told after the title."""
    frame = Frame(width=WIDTH, height=height, left=62, right=20, top=28)
    longest = max(spanned((mark.x, mark.across) for mark in marks))
    x = linear_scale(most * longest, name="time of a token, full model = 1", **frame.across)
    losses = spanned((mark.y, mark.upwards) for mark in marks)
    y = loss_scale(losses, name="perplexity lost", **frame.upwards)
    title = f"Time and quality with {held} in fast memory"
    note = f"{grounds}; lower left is better"
    return scatter(title, marks, x, y, frame, says=title + says, note=note, key=KEY)


def _beside(row: DemoRow, what: str) -> str:
    words = compared(row.times_full)
    return f"{words} {'as' if words == 'as fast' else 'than'} {what}"


def _cost(row: DemoRow) -> str:
    if row.is_distinguishable:
        return f"cost {loss_words(row.loss, row.loss_error, digits=1)} of perplexity"
    same = f"{100 * row.top1_agreement:.0f} % of first choices the same"
    return (
        f"altered the output, its loss {loss_words(row.loss, row.loss_error, digits=1)} and {same}"
    )


def _kind(row: DemoRow) -> str:
    return "full" if row.preset == FULL else "exact" if row.is_exact else "altered"
