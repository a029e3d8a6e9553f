"""Predicts from measured tables how much a replay's lossy choices change the layers' outputs:
squared error a token."""

from dataclasses import dataclass, field

from artifacts.errors import BadInput
from artifacts.quantisation.replicas import Replicas, passed_on
from artifacts.quantisation.widths import column_of
from artifacts.routing.similarity import Similarity
from artifacts.shape import FULL_BITS
from artifacts.traces.trace import DECODE
from runtime.control.plan import Plan
from runtime.policies.base import Step


@dataclass(slots=True)
class Damage:
    """Called with every step of a replay. Sums the mean squared change of the layers' outputs over
    decoded tokens, weighted by what later layers pass on.

    `few_bits`: of experts computed at few bits, by the loss table. `replaced`: of experts that were
    replaced or dropped, by the similarity table. Raises BadInput when the table is missing.
    """

    replicas: Replicas | None
    similarity: Similarity | None
    num_layers: int
    few_bits: float = 0.0
    replaced: float = 0.0
    num_steps: int = 0
    _passed_on: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._passed_on = passed_on(self.num_layers).ravel().tolist()

    def __call__(self, step: Step, plan: Plan) -> None:
        if step.phase != DECODE:
            return
        self.num_steps += len(step.selected)
        factor = self._passed_on[step.layer]
        if plan.selected is not step.selected:
            self.replaced += factor * self._standing_in(step, plan)
        few = {place.key: place.bits for place in _places(plan) if place.bits != FULL_BITS}
        if few:
            self.few_bits += factor * self._rounded(step, plan, few)

    @property
    def per_token(self) -> tuple[float, float]:
        """`few_bits` and `replaced` of one decoded token."""
        num_tokens = max(1, self.num_steps / self.num_layers)
        return self.few_bits / num_tokens, self.replaced / num_tokens

    def _rounded(self, step: Step, plan: Plan, few: dict[int, int]) -> float:
        if self.replicas is None:
            raise BadInput("no loss at few bits is measured: run `moectl quantize`")
        loss = self.replicas.loss[step.layer]
        bits = {key % loss.shape[0]: width for key, width in few.items()}
        weights = step.weights if plan.weights is None else plan.weights
        pairs = zip(plan.selected.ravel().tolist(), weights.ravel().tolist(), strict=True)
        return sum(
            weight**2 * loss[expert, column_of(bits[expert])]
            for expert, weight in pairs
            if expert in bits
        )

    def _standing_in(self, step: Step, plan: Plan) -> float:
        total = 0.0
        for own, served in zip(step.selected.tolist(), plan.selected.tolist(), strict=True):
            gone = [expert for expert in own if expert not in served]
            came = [expert for expert in served if expert not in own]
            if gone and self.similarity is None:
                raise BadInput("no loss of stand-ins is measured: run `moectl profile`")
            for rank, expert in enumerate(gone):
                stand_in = came[rank] if rank < len(came) else -1
                total += float(
                    self.similarity.left_out[step.layer, expert]
                    if stand_in < 0
                    else self.similarity.loss[step.layer, expert, stand_in]
                )
        return total


def _places(plan: Plan):
    yield from plan.low
    yield from plan.near
    for wave in plan.waves:
        yield from wave.resident
        yield from wave.loads
