"""Measured times of a model on a machine: seconds of the parts of a pass, of loads, of the near
tier.

One row of the table `hardware` holds one number of tokens, one width near memory, or one link.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import quantiles
from typing import TYPE_CHECKING

from artifacts.errors import BadInput
from artifacts.shape import FULL_BITS

if TYPE_CHECKING:  # pyarrow takes memory that a run without a profile does not need
    import pyarrow as pa


COMMAND = "profile-hardware"
REMEDY = "run `moectl profile --hardware`"
DISK = "disk"
COLD = "disk, cold"  # the checkpoint's files, dropped from the page cache first
RAM = "ram"
PINNED = "pinned"
PAGEABLE = "pageable"
NAMED_LINKS = (DISK, COLD, RAM, PINNED, PAGEABLE)  # any other name is a rate of an emulated link
EACH_LOAD = "each load"
_IDENTITY = ("device", "device_name", "processor", "cores")
_OPTIONAL = ("miss", "host", "latency")  # of a load, where they were measured
_SECONDS = ("attention", "moe", "head", "expert", "near", "expert_load", *_OPTIONAL)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the median of `samples` samples, and the distance between their quartiles."""

    median: float
    iqr: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Summarise at least two samples. The median is never negative: on a busy machine,
        differences of two readings can be."""
        lower, median, upper = quantiles(seconds, n=4, method="inclusive")
        return cls(max(0.0, median), upper - lower, len(seconds))


@dataclass(frozen=True, slots=True)
class Compute:
    """Times of a pass of `tokens` tokens: one layer without its routed experts; its routed experts,
    top-k for each token; the head on all tokens. `expert`: one expert on as many tokens. One token
    is a decode step, more are a prompt."""

    tokens: int
    attention: Spread
    moe: Spread
    head: Spread
    expert: Spread


@dataclass(frozen=True, slots=True)
class Load:
    """One expert at full precision over a link; GB/s by the median. `latency`: the part of the time
    that fewer bytes would take too.

    For the link that runs use, `miss` is the time that each missing expert adds to a decode step.
    `host` is the part of it that is the engine's own work, during which nothing waits for the link.
    """

    link: str
    seconds: Spread
    gbps: float
    miss: Spread | None = None
    host: Spread | None = None
    latency: Spread | None = None


@dataclass(frozen=True, slots=True)
class NearCompute:
    """One expert on `tokens` tokens, computed by the CPU where the expert lies in RAM, at `bits`
    bits."""

    bits: int | float
    tokens: int
    seconds: Spread


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Measurements of one machine and model, ascending in tokens. `conditions`: device, processor,
    cores, threads, dtype, load and whatever else makes figures differ; their `link` is the one that
    a run uses by default."""

    compute: tuple[Compute, ...]
    loads: tuple[Load, ...]
    near: tuple[NearCompute, ...]
    conditions: Mapping[str, object]

    @property
    def device(self) -> str:
        return str(self.conditions["device"])

    @property
    def machine(self) -> tuple[object, ...]:
        """Identity of the machine: two profiles with equal values come from the same one."""
        return tuple(self.conditions.get(name) for name in _IDENTITY)

    @property
    def decode(self) -> Compute:
        """The times of a decode step of one token."""
        return self.compute[0]

    def load(self, link: str | None = None) -> Load:
        """The load over a link, by default the one that runs use. Raises BadInput when it was not
        measured."""
        wanted = link or self.conditions["link"]
        for load in self.loads:
            if load.link == wanted:
                return load
        measured = ", ".join(load.link for load in self.loads)
        raise BadInput(
            f"the hardware profile has no link {wanted}, only {measured}: {REMEDY} --link {wanted}"
        )

    @property
    def deciding(self) -> Mapping[str, float]:
        """Seconds per layer that policies themselves take beyond the plain ones, by axis and text;
        under `EACH_LOAD`, seconds to decide on one load. Empty where that was not measured."""
        return self.conditions.get("deciding", {})

    def near_at(self, bits: int = FULL_BITS) -> list[NearCompute]:
        """Near-tier times at one width, ascending in tokens; empty where they were not measured."""
        return sorted(
            (near for near in self.near if near.bits == bits), key=lambda near: near.tokens
        )


def to_rows(profile: HardwareProfile) -> "pa.Table":
    """Rows of `hardware`; columns that a row does not measure are NULL."""
    import pyarrow as pa

    schema = pa.schema(
        [
            ("device", pa.string()),
            ("tokens", pa.int32()),
            ("link", pa.string()),
            ("bits", pa.float64()),
        ]
        + [(f"{name}{end}", pa.float64()) for name in _SECONDS for end in ("_s", "_iqr_s")]
        + [("bandwidth_gbps", pa.float64()), ("samples", pa.int32())]
    )
    rows = [
        {"tokens": parts.tokens}
        | _columns(attention=parts.attention, moe=parts.moe, head=parts.head, expert=parts.expert)
        for parts in profile.compute
    ]
    rows += [
        {"tokens": near.tokens, "bits": near.bits, **_columns(near=near.seconds)}
        for near in profile.near
    ]
    rows += [
        {"link": load.link, "bandwidth_gbps": load.gbps}
        | _columns(expert_load=load.seconds, miss=load.miss, host=load.host, latency=load.latency)
        for load in profile.loads
    ]
    always = {"device": profile.device, "bits": FULL_BITS}
    return pa.Table.from_pylist(
        [dict.fromkeys(schema.names) | always | row for row in rows], schema=schema
    )


def from_rows(rows: "pa.Table", conditions: Mapping[str, object]) -> HardwareProfile:
    """Rebuild the profile from the rows that `to_rows` wrote. Raises BadInput."""
    compute = []
    loads = []
    near = []
    for row in rows.to_pylist():
        if row["link"] is not None:
            optional = {
                name: _spread(row, name) for name in _OPTIONAL if row.get(f"{name}_s") is not None
            }
            loads.append(
                Load(row["link"], _spread(row, "expert_load"), row["bandwidth_gbps"], **optional)
            )
        elif row["near_s"] is not None:
            bits = row["bits"]
            bits = int(bits) if bits.is_integer() else bits
            near.append(NearCompute(bits, row["tokens"], _spread(row, "near")))
        else:
            parts = (_spread(row, name) for name in ("attention", "moe", "head", "expert"))
            compute.append(Compute(row["tokens"], *parts))
    return HardwareProfile(tuple(compute), tuple(loads), tuple(near), conditions)


def _columns(**measured: Spread | None) -> dict[str, float | int]:
    spreads = {name: spread for name, spread in measured.items() if spread is not None}
    medians = {f"{name}_s": spread.median for name, spread in spreads.items()}
    ranges = {f"{name}_iqr_s": spread.iqr for name, spread in spreads.items()}
    return medians | ranges | {"samples": min(spread.samples for spread in spreads.values())}


def _spread(row: Mapping[str, object], name: str) -> Spread:
    median = row[f"{name}_s"]
    iqr = row[f"{name}_iqr_s"]
    if any(seconds is None or not 0 <= seconds < inf for seconds in (median, iqr)):
        raise BadInput(f"the hardware profile has {name} of {median} s: {REMEDY} again")
    return Spread(median, iqr, row["samples"])
