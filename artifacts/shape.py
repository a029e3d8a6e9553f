"""The shape of a Mixture-of-Experts model, as far as policies and artefacts need it."""

from dataclasses import dataclass

from artifacts.errors import BadInput


@dataclass(frozen=True, slots=True)
class Shape:
    """L MoE layers of E experts each, K selected per token, `expert_nbytes` bytes an expert at full precision.

    A key `(layer, expert)` is the integer `layer * E + expert`: integers are ordered as ties are broken.
    """

    num_layers: int
    num_experts: int
    top_k: int
    expert_nbytes: int

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.top_k) < 1:
            raise BadInput(f"a model needs at least one MoE layer, one expert and one expert per token, not {self}")
        if self.top_k > self.num_experts:
            raise BadInput(
                f"the model selects {self.top_k} experts per token but has only {self.num_experts} in a layer: "
                "correct num_experts_per_tok in its config"
            )

    @property
    def num_keys(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def nbytes(self) -> int:
        """Bytes of all routed experts together."""
        return self.num_keys * self.expert_nbytes
