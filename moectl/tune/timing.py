"""The division of a search's minutes among its phases, and the list of what there was no time
for."""

from dataclasses import dataclass, field

from artifacts.hardware.costs import Costs
from artifacts.shape import Shape
from moectl.shared.terminal.progress import Phases
from profilers.compare.bench import BenchText

SHARES = (1, 12, 12, 7, 9, 33, 10, 12, 2, 2)  # of the time, one for each phase of a search
NO_SCALE = "what errors cost, without which nothing that loses anything is chosen"


@dataclass(slots=True)
class Minutes:
    """The phases of a search, whose limit is `--minutes`; `left_out` lists in words what they did
    not suffice for."""

    phases: Phases
    left_out: list[str] = field(default_factory=list)

    def lack(self, what: str) -> bool:
        """Return whether the present phase has used up its time; if so, list `what` as left out."""
        if self.phases.is_late():
            self.left_out.append(what)
            return True
        return False

    def cut(self, text: BenchText, what: str, *, token_s: float, least: int) -> BenchText:
        """Return as many sequences of the text as the present phase has time for, and at least
        `least`. A token takes `token_s` seconds; `what` names the text."""
        whole = len(text.sequences)
        fitting = max(0.0, self.phases.left_s) / (len(text.sequences[0]) * token_s)
        num = whole if fitting >= whole else min(whole, max(least, int(fitting)))
        if num < whole:
            self.left_out.append(f"{whole - num} of {whole} sequences of {what}")
        return BenchText(text.sequences[:num], text.prefill, asked=text.asked)


def token_seconds(costs: Costs, shape: Shape, *, loads: bool) -> float:
    """Return the seconds of a token whose experts are all resident, or are all brought first if
    `loads`."""
    each_s = costs.expert.seconds(1) + (
        costs.load_s + costs.load_latency_s + costs.host_s if loads else 0.0
    )
    return costs.head.seconds(1) + shape.num_layers * (costs.rest.seconds(1) + shape.top_k * each_s)
