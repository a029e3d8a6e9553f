"""Costs of one model on one machine: seconds of compute, of loads and of the near tier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from artifacts.formats.dense import DENSE
from artifacts.hardware.machines import Machine
from artifacts.modelshapes.known import ModelShape
from artifacts.shape import FULL_BITS

DENSE_ON_GPU = (
    "weights besides experts at {bits} bits: a GPU has no kernel for them and dequantises them at "
    "each use; counted as written and read once at 16 bits, while torch moves more"
)

_MOST_RATIO = 1024.0


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a tier: seconds to read its bytes, however many tokens there are, and seconds of
    arithmetic per token, which shrink with the bytes if the work is `by_bits`."""

    memory_s: float
    token_s: float = 0.0
    by_bits: bool = False

    def scaled(self, share: float) -> "Work":
        """The same work on this share of the bytes."""
        return replace(
            self,
            memory_s=self.memory_s * share,
            token_s=self.token_s * (share if self.by_bits else 1.0),
        )

    def seconds(self, num_tokens: int, *, share: float = 1.0) -> float:
        """Return the seconds for `num_tokens` tokens when only `share` of the bytes are read, as
        for a replica of fewer bits."""
        return max(
            self.memory_s * share, num_tokens * self.token_s * (share if self.by_bits else 1.0)
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one model on one machine.

    The expert, its load and its near-tier work are given at full precision; a replica takes its
    share of the bytes. `rest` is one layer without its routed experts, `head` is once per pass.

    Every load also takes `load_latency_s` of the link, and `host_s` of the device that computes,
    for the engine's own work. Where compute has to take over the bytes that the link delivers, that
    takes `copy_s`, and `demand_s` more for a demand load; compute that has waited resumes `wake_s`
    late. Where the device that computes all other experts computes near experts too, as on a CPU,
    each takes `near_host` of its time, and `near` is the time that an emulated near tier takes in
    addition. A step with near experts takes the near tier `near_step_s` besides, however many there
    are.

    `contention`: the part of the near tier's rate that it loses while the link is busy, because
    both read the same memory; 0 where that is not known.

    `shares`: share of an expert's seconds in the fast tier by bits, where fewer bits do not save as
    much time as bytes. `deciding`: seconds per layer that a policy itself takes beyond the plain
    policy, by axis and text as in `prefetch next_gate`, or by its name where the text is missing.
    `reads_whole`: a segment takes the link as long as a whole expert.
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
    contention: float = 0.0
    near_step_s: float = 0.0
    shares: Mapping[int, float] = field(default_factory=dict)
    deciding: Mapping[str, float] = field(default_factory=dict)
    reads_whole: bool = False

    @classmethod
    def of(cls, model: ModelShape, machine: Machine) -> "Costs":
        """Estimate the costs from the data sheet, or take the machine's own seconds. Weights
        besides experts count in 16 bits, attention without its cache; norms and routers cost
        nothing."""

        def work(nbytes: float, weight_nbytes: float = 2.0) -> Work:
            operations = 2 * nbytes / weight_nbytes  # two per weight and token
            return Work(
                nbytes / (machine.fast_gbps * 1e9), operations / (machine.fast_tflops * 1e12)
            )

        def known(seconds: float | None, estimated: Work) -> Work:
            return estimated if seconds is None else replace(estimated, memory_s=seconds)

        nbytes = model.shape.expert_nbytes
        is_timed = machine.load_s is not None
        near_operations = 2 * nbytes / model.weight_nbytes
        return cls(
            expert=work(nbytes, model.weight_nbytes),
            load_s=machine.load_s if is_timed else nbytes / (machine.link_gbps * 1e9),
            load_latency_s=0.0 if is_timed else machine.link_latency_s,
            near=Work(
                nbytes / (machine.near_gbps * 1e9),
                near_operations / (machine.near_tflops * 1e12),
                machine.near_by_bits,
            ),
            contention=machine.contention,
            rest=known(machine.layer_s, work(model.attention_nbytes + model.shared_nbytes)),
            head=known(machine.head_s, work(model.vocabulary * model.hidden * 2)),
        )

    def on_base(self, bits: int, share: float) -> "Costs":
        """The costs where the replica of `bits` bits, `share` of the bytes, takes the place of full
        precision."""
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
            shares={
                width: of_width / fast for width, of_width in self.shares.items() if width < bits
            },
        )

    def with_dense(self, bits: int | None) -> "Costs":
        """Return the costs on a GPU where weights besides routed experts have this many bits; None:
        as they are.

        There is no kernel for them on a GPU: at each use the packed matrix is read, and at least
        once written and read at 16 bits.
        """
        if bits is None:
            return self
        share = DENSE[bits].nbytes / DENSE[bits].num_weights / 2 + 2
        return replace(self, rest=self.rest.scaled(share), head=self.head.scaled(share))

    @property
    def link_over_near(self) -> float:
        """The bandwidth of the link over the near tier's, as `rounded_ratio` rounds it."""
        near_s = max(self.near.memory_s, self.near_host.memory_s)
        return rounded_ratio(near_s / (self.load_s + self.load_latency_s))

    def window_nbytes(self, expert_nbytes: int, top_k: int) -> int:
        """Bytes that the link moves while one layer of one token is computed."""
        layer_s = self.rest.seconds(1) + top_k * self.expert.seconds(1)
        return rounded_window(layer_s / (self.load_latency_s + self.load_s), expert_nbytes)


def rounded_window(num_experts: float, expert_nbytes: int) -> int:
    """Return the bytes of a window of `num_experts` experts, rounded to a power of two of experts.

    Without rounding, the noise of a measurement would change what a policy decides.
    """
    return max(1, round(2.0 ** round(math.log2(num_experts)) * expert_nbytes))


def rounded_ratio(link_over_near: float) -> float:
    """Return the bandwidth of a link over that of a near tier, rounded to a quarter of a power of
    two, and then to three digits, as receipts show it. The reason is that of `rounded_window`.
    A tier that takes no time, or for ever, is taken for a thousand times as fast, or as slow."""
    finite = min(max(link_over_near, 1 / _MOST_RATIO), _MOST_RATIO)
    return float(f"{2.0 ** (round(4 * math.log2(finite)) / 4):.3g}")
