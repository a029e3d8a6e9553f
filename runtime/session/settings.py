"""The settings of a run. Imports no torch, so that a wrong option is refused within
milliseconds."""

from dataclasses import dataclass, field
from typing import Any

from artifacts.common.suggestions import unknown
from artifacts.errors import BadUsage
from artifacts.formats.dense import check_dense
from artifacts.modelshapes import kv_cache
from runtime.control.sizes import budget_text
from runtime.drafters.base import NONE, Draft
from runtime.policies import POLICIES, Policies, as_texts, build
from runtime.policies.eviction.late_horizon import LateHorizon
from runtime.policies.eviction.lfu import Lfu
from runtime.policies.prefetch.next_gate import NextGate
from runtime.policies.presets import Preset, Scope, preset

# how experts are computed: to the model's own bits, or by compiled kernels
EXACT = "exact"
FUSED = "fused"
# side that decides which experts a decoded token evicts
HOST = "host"
DEVICE = "device"
# in the place of both: what is the fastest for this model on this device, settled at opening
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a run, in the texts of the command line's options. `policies` overrides axes of
    the preset. Raises BadUsage for values that are not understood or do not go together."""

    preset: str | Preset = "on-demand"
    policies: dict[str, Any] = field(default_factory=dict)  # by axis: text, or a policy object
    budget: str | float = "25%"  # of the fast tier; a number is a share, and kept as its text
    scope: str | None = None  # of eviction; None: the preset's own
    link: str = "auto"
    near: str | None = None  # bandwidth of the near tier
    scaled_to: str | None = None  # machine whose ratios of load to compute are emulated
    window: str | None = None  # bytes that a step may prefetch; None: measured
    device: str = "auto"
    experts: str = EXACT
    threads: int | None = None  # of CPU compute; None: torch's own number
    # over which experts are spread: GPUs, or parts of one device where there are fewer
    devices: int = 1
    # whose splits are used; None: machine `scaled_to`, or this one over this link
    machine: str | None = None
    reconfigure_every: int | None = None  # tokens after which a split is solved anew; 0: never
    verify: bool = False  # compare replica files with their hashes before any is used
    # add the run's iterations to the expert maps, starting with none if the store has none
    learn: bool = False
    # bits of linear layers besides experts and routers, 8 or 4; None: as the model is open
    dense: int | None = None
    decide: str = HOST
    kv_cache_dtype: str = kv_cache.AUTO  # of keys and values: as computed, int8 or int4
    # bits of tokens that compiled code on a CPU multiplies by blocks of 32 weights; None: as
    # computed
    activations: int | None = None
    # drafter of the tokens that one pass verifies together: none, auto or NAME[=ARGUMENT][:k]
    draft: str = NONE

    def __post_init__(self) -> None:
        if self.scaled_to and (self.link != "auto" or self.near):
            raise BadUsage(
                "--scaled-to sets the link and the near tier itself: leave out --link and --near"
            )
        check_experts(self.experts)
        check_dense(self.dense)
        check_activations(self.activations, self.experts)
        kv_cache.kv_bits(self.kv_cache_dtype)
        Draft.parse(self.draft)
        if self.decide not in (AUTO, HOST, DEVICE):
            raise BadUsage(unknown("who decides", self.decide, (AUTO, HOST, DEVICE)))
        if self.scope not in (None, *Scope):
            raise BadUsage(f"scope is layer or global, not {self.scope!r}")
        object.__setattr__(self, "budget", budget_text(self.budget))
        object.__setattr__(self, "policies", as_texts(self.policies))
        policies = build(self.texts())  # refuses unknown names before a model is opened
        if self.decide == DEVICE:
            self._check_device_decides(policies)
        if self.learn and "maps" not in policies.requires:
            raise BadUsage(
                "--learn adds to expert maps, and no policy chosen here uses any: give --preset "
                "fmoe"
            )

    def _check_device_decides(self, policies: Policies) -> None:
        """Raise BadUsage where a device could not decide as the policies would."""
        plain = build(preset("on-demand").texts())
        prefetch = policies.prefetch
        eviction = policies.eviction
        others = {axis for axis in POLICIES if getattr(policies, axis) != getattr(plain, axis)}
        if eviction in (Lfu(), LateHorizon()):
            others -= {"eviction"}
        if isinstance(prefetch, NextGate) and prefetch.distance == 1 and not prefetch.through:
            others -= {"prefetch"}
        if others:
            raise BadUsage(
                "--decide device decides as preset on-demand does: give --preset on-demand, and "
                "no other policies than --eviction lfu or late_horizon and --prefetch next_gate, "
                "for the next layer"
            )
        if Scope(self.scope or preset(self.preset).scope) is not Scope.LAYER:
            raise BadUsage(
                "--decide device keeps each layer's experts in slots of its own: give --scope layer"
            )
        if self.experts == EXACT:
            raise BadUsage(
                "--decide device leaves slot numbers to the kernels of a GPU: give --experts fused"
            )
        if self.kv_cache_dtype != kv_cache.AUTO:
            raise BadUsage(
                "--decide device replays tokens over keys and values as they are: leave out "
                "--kv-cache-dtype"
            )
        if self.devices > 1:
            raise BadUsage("--decide device knows one GPU: leave out --devices")

    @property
    def may_decide_on_device(self) -> bool:
        """True where a device could decide as the policies would."""
        try:
            self._check_device_decides(build(self.texts()))
        except BadUsage:
            return False
        return True

    def texts(self) -> dict[str, str]:
        """The text of every axis: the preset's, unless `policies` overrides it."""
        return preset(self.preset).texts() | self.policies

    @property
    def requires(self) -> frozenset[str]:
        """Names of the artefacts that the policies require."""
        return build(self.texts()).requires

    @property
    def wants(self) -> frozenset[str]:
        """Names of the artefacts that the policies require or use if they exist."""
        return build(self.texts()).wants


def check_experts(name: str) -> None:
    """Raise BadUsage unless `name` is a way to compute a token's experts."""
    if name not in (AUTO, EXACT, FUSED):
        raise BadUsage(unknown("way to compute experts", name, (AUTO, EXACT, FUSED)))


def check_activations(bits: int | None, experts: str) -> None:
    """Raise BadUsage unless tokens of so many bits can be multiplied where experts are computed in
    this way."""
    if bits not in (None, 8):
        raise BadUsage(f"--activations {bits}: give 8, or leave it out for tokens as computed")
    if bits and experts == EXACT:
        raise BadUsage("--activations 8 is of compiled kernels: give --experts fused")
