"""What a user may choose of a run."""

from dataclasses import dataclass, field

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from runtime.policies import build
from runtime.policies.presets import Preset, Scope, preset

EXACT, FUSED = "exact", "fused"  # experts: the model's own bits, or compiled kernels


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may choose. `policies` overrides a preset's axes; texts are those of the command line."""

    preset: str | Preset = "on-demand"
    policies: dict[str, str] = field(default_factory=dict)
    budget: str = "25%"
    scope: str | None = None
    link: str = "auto"
    near: str | None = None
    scaled_to: str | None = None
    window: str | None = None
    device: str = "auto"
    experts: str = EXACT
    threads: int | None = None  # of CPU compute; None leaves torch as it is
    devices: int = 1  # that experts are spread over: GPUs, or parts of one device where there are fewer
    machine: str | None = None  # whose splits fit; None: that of `scaled_to`, or this one over this link
    reconfigure_every: int | None = None  # tokens after which a split is solved anew; 0: never
    verify: bool = False  # replica files are compared with their hashes before anything is read of them
    learn: bool = False  # iterations join the expert maps as they come, from none if need be

    def __post_init__(self) -> None:
        if self.scaled_to and (self.link != "auto" or self.near):
            raise BadUsage("--scaled-to sets the link and the near tier itself: leave out --link and --near")
        check_experts(self.experts)
        if self.scope not in (None, *Scope):
            raise BadUsage(f"scope is layer or global, not {self.scope!r}")
        chosen = build(self.texts())  # a name that is not known is told before a model is opened
        if self.learn and "maps" not in chosen.requires:
            raise BadUsage("--learn adds to expert maps, and no policy chosen here uses any: give --preset fmoe")

    def texts(self) -> dict[str, str]:
        """The text of every axis."""
        return preset(self.preset).texts() | self.policies

    @property
    def requires(self) -> frozenset[str]:
        """Artefacts that the chosen policies cannot do without."""
        return build(self.texts()).requires

    @property
    def wants(self) -> frozenset[str]:
        """Those, and what they take where it is there."""
        return build(self.texts()).wants


def check_experts(name: str) -> None:
    """Raise BadUsage unless it is a way to compute a token's experts."""
    if name not in (EXACT, FUSED):
        raise BadUsage(unknown("way to compute experts", name, (EXACT, FUSED)))
