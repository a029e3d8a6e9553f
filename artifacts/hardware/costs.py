"""What one model costs on one machine: seconds of compute, loads and the near tier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import FULL_BITS


@dataclass(frozen=True, slots=True)
class Work:
    """Something a tier computes: bytes it reads however many tokens there are, seconds of arithmetic a token."""

    memory_s: float
    token_s: float = 0.0

    def scaled(self, share: float) -> "Work":
        """The same on so many of the bytes."""
        return Work(self.memory_s * share, self.token_s)

    def seconds(self, num_tokens: int, *, share: float = 1.0) -> float:
        """`share` of the bytes are read, as of a replica of fewer bits."""
        return max(self.memory_s * share, num_tokens * self.token_s)


@dataclass(frozen=True, slots=True)
class Costs:
    """What one model costs on one machine. `rest`: of a layer, all but its routed experts; `head`: of a pass.

    Loading an expert and computing it near its memory are given at full precision; a replica takes its share of bytes.
    Each load takes `load_latency_s` of the link besides, and `host_s` of whoever computes: the engine's own work on it.
    Where the link leaves it to compute to take what comes, that takes `copy_s`, and `demand_s` more for what the step
    itself asked for; compute that has waited goes on `wake_s` late.
    Where near experts are computed by whoever computes the others, as on a CPU, `near_host` is what each takes of that
    time, and `near` what an emulated tier takes besides. `shares`: of an expert's seconds in the fast tier, by bits,
    where few bits do not save as much time as bytes. `deciding`: of a
    layer, what a policy takes itself beyond what the plain one does, by axis and text as in `prefetch next_gate`, or by
    its name where the text is not there.
    `reads_whole`: a segment takes the link as long as its expert.
    """

    expert: Work
    load_s: float
    load_latency_s: float
    near: Work
    rest: Work
    head: Work
    host_s: float = 0.0
    copy_s: float = 0.0
    demand_s: float = 0.0
    wake_s: float = 0.0
    near_host: Work = Work(0.0)
    shares: Mapping[int, float] = field(default_factory=dict)
    deciding: Mapping[str, float] = field(default_factory=dict)
    reads_whole: bool = False

    @classmethod
    def of(cls, model: ModelShape, machine: Machine) -> "Costs":
        """Estimates: attention is four matrices of H x H in 16 bits, its cache not counted; norms and routers are
        free."""

        def work(nbytes: float, weight_nbytes: float = 2.0) -> Work:
            operations = 2 * nbytes / weight_nbytes  # a weight and token
            return Work(nbytes / (machine.fast_gbps * 1e9), operations / (machine.fast_tflops * 1e12))

        nbytes = model.shape.expert_nbytes
        return cls(
            expert=work(nbytes, model.weight_nbytes),
            load_s=nbytes / (machine.link_gbps * 1e9),
            load_latency_s=machine.link_latency_s,
            near=Work(
                nbytes / (machine.near_gbps * 1e9), 2 * nbytes / model.weight_nbytes / (machine.near_tflops * 1e12)
            ),
            rest=work(4 * model.hidden**2 * 2 + model.shared_nbytes),
            head=work(model.vocabulary * model.hidden * 2),
        )

    def on_base(self, bits: int, share: float) -> "Costs":
        """Where experts' own form is their replica of so many bits, `share` of their bytes."""
        if bits == FULL_BITS:
            return self
        fast = self.shares.get(bits, share)
        return replace(
            self,
            expert=self.expert.scaled(fast),
            load_s=self.load_s * share,
            copy_s=self.copy_s * share,
            near=self.near.scaled(share),
            near_host=self.near_host.scaled(fast),
            shares={width: own / fast for width, own in self.shares.items() if width < bits},
        )

    def window_nbytes(self, expert_nbytes: int, top_k: int) -> int:
        """Bytes that the link moves while one layer of one token is computed."""
        layer_s = self.rest.seconds(1) + top_k * self.expert.seconds(1)
        return rounded_window(layer_s / (self.load_latency_s + self.load_s), expert_nbytes)


def rounded_window(num_experts: float, expert_nbytes: int) -> int:
    """A window of so many experts in bytes, as a power of two of experts.

    Rounded, so that the noise of a measurement does not change what a policy decides.
    """
    return max(1, round(2.0 ** round(math.log2(num_experts)) * expert_nbytes))
