"""The shape of a Mixture-of-Experts model, as far as policies and artefacts need it."""

from dataclasses import dataclass, field

from artifacts.errors import BadInput

# of a model
MOST_LAYERS = 4096
MOST_KEYS = 1 << 20
MOST_EXPERTS = 1 << 16  # of a layer: ids have 16 bits
# stands for full precision: the checkpoint's own format, whatever it is, or a base replica
FULL_BITS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """L MoE layers of E experts each, K selected per token, `expert_nbytes` bytes per expert at
    full precision.

    A key `(layer, expert)` is the integer `layer * E + expert`, and ties between keys are broken by
    the smaller integer. An expert consists of `num_neurons` neurons of `neuron_nbytes` bytes, and
    of bytes that belong to no neuron. Where the number of neurons is unknown it is 0, and each byte
    counts as a neuron.
    """

    num_layers: int
    num_experts: int
    top_k: int
    expert_nbytes: int
    num_neurons: int = field(default=0, compare=False)
    neuron_nbytes: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.top_k) < 1:
            raise BadInput(
                "a model needs at least one MoE layer, one expert and one expert per token, not "
                f"{self}"
            )
        if self.num_experts > MOST_EXPERTS or self.num_keys > MOST_KEYS:
            raise BadInput(
                f"{self.num_layers:,} layers of {self.num_experts:,} experts are more than moectl "
                f"tells apart: {MOST_EXPERTS:,} in a layer, {MOST_KEYS:,} in all"
            )
        if self.top_k > self.num_experts:
            raise BadInput(
                f"the model selects {self.top_k} experts per token but has only "
                f"{self.num_experts} in a layer: correct num_experts_per_tok in its config"
            )

    @property
    def num_keys(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def nbytes(self) -> int:
        """Bytes of all routed experts together."""
        return self.num_keys * self.expert_nbytes

    def num_distinct(self, num_tokens: int) -> float:
        """Return the mean number of distinct experts of a layer that `num_tokens` tokens want,
        where experts are wanted equally often."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)

    def top_neurons(self, theta: float) -> int:
        """Neurons in the top segment of an expert that is split at `theta`: at least one, all of
        them at 1."""
        neurons = self.num_neurons or self.expert_nbytes
        return min(max(1, round(theta * neurons)), neurons)

    def segment_nbytes(self, top_neurons: int) -> tuple[int, int]:
        """Return the bytes of the top segment, with the bytes that belong to no neuron, and of the
        bottom segment."""
        bottom = ((self.num_neurons or self.expert_nbytes) - top_neurons) * self.neuron_nbytes
        return self.expert_nbytes - bottom, bottom
