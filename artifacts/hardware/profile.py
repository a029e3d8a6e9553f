"""What a machine takes for a model, as measured: seconds of the parts of a pass, of loads, of the near tier.

One row of the table `hardware` is one number of tokens, one width near memory, or one link (DESIGN 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import quantiles
from typing import TYPE_CHECKING

from artifacts.errors import BadInput
from artifacts.shape import FULL_BITS

if TYPE_CHECKING:  # as in artifacts/routing/predictors.py
    import pyarrow as pa


COMMAND = "profile-hardware"
REMEDY = "run `moectl profile --hardware`"
DISK = "disk"
COLD = "disk, cold"  # the checkpoint's files, what the operating system had kept of them dropped before
RAM, PINNED, PAGEABLE = "ram", "pinned", "pageable"
NAMED_LINKS = (DISK, COLD, RAM, PINNED, PAGEABLE)  # any other is a rate, and emulated
EACH_LOAD = "each load"
_IDENTITY = ("device", "device_name", "processor", "cores")


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the median of so many samples, and how far apart their quartiles are."""

    median: float
    iqr: float
    samples: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Of at least two samples. Differences of two readings come out below nothing on a busy machine, which no time
        is."""
        lower, median, upper = quantiles(seconds, n=4, method="inclusive")
        return cls(max(0.0, median), upper - lower, len(seconds))


@dataclass(frozen=True, slots=True)
class Compute:
    """With `tokens` in a pass: a layer without its routed experts; its routed experts, top-k for each token; the head
    on all of them. `expert`: one expert on as many tokens. One token is a decode step, more are a prompt."""

    tokens: int
    attention: Spread
    moe: Spread
    head: Spread
    expert: Spread


@dataclass(frozen=True, slots=True)
class Load:
    """One expert at full precision over a link; GB/s by the median. `latency`: of it what fewer bytes would take too.

    Of the link that runs take, `miss`: what each expert that is not there adds to a decode step in which none is, and
    `host`: of that, the engine's own work, for which nobody waits on the link."""

    link: str
    seconds: Spread
    gbps: float
    miss: Spread | None = None
    host: Spread | None = None
    latency: Spread | None = None


@dataclass(frozen=True, slots=True)
class NearCompute:
    """One expert on `tokens` by the CPU, where it lies in RAM, at so many bits."""

    bits: int
    tokens: int
    seconds: Spread


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Of one machine and model. `conditions`: device, processor, cores, threads, dtype, load and what else tells
    figures apart; `link` in them is the one that a run takes by itself. Ascending in tokens."""

    compute: tuple[Compute, ...]
    loads: tuple[Load, ...]
    near: tuple[NearCompute, ...]
    conditions: Mapping[str, object]

    @property
    def device(self) -> str:
        return str(self.conditions["device"])

    @property
    def machine(self) -> tuple[object, ...]:
        """By this a machine is the same as another."""
        return tuple(self.conditions.get(name) for name in _IDENTITY)

    @property
    def decode(self) -> Compute:
        """A step of one token."""
        return self.compute[0]

    def load(self, link: str | None = None) -> Load:
        """Over a link, by default the one of a run. Raises BadInput when it was not measured."""
        wanted = link or self.conditions["link"]
        for load in self.loads:
            if load.link == wanted:
                return load
        known = ", ".join(load.link for load in self.loads)
        raise BadInput(f"the hardware profile has no link {wanted}, only {known}: {REMEDY} --link {wanted}")

    @property
    def deciding(self) -> Mapping[str, float]:
        """Seconds a layer that policies take themselves beyond the plain ones, by axis and text; and `EACH_LOAD`, that
        deciding on one load takes. Empty where that was not measured."""
        return self.conditions.get("deciding", {})

    def near_at(self, bits: int = FULL_BITS) -> list[NearCompute]:
        """At one width, ascending in tokens; none where it was not measured."""
        return sorted((near for near in self.near if near.bits == bits), key=lambda near: near.tokens)


_BESIDE = ("miss", "host", "latency")  # of a load, where they were measured
_SECONDS = ("attention", "moe", "head", "expert", "near", "expert_load", *_BESIDE)


def to_rows(profile: HardwareProfile) -> "pa.Table":
    """Rows of `hardware`; what a row does not measure is NULL."""
    import pyarrow as pa

    schema = pa.schema(
        [("device", pa.string()), ("tokens", pa.int32()), ("link", pa.string()), ("bits", pa.uint16())]
        + [(f"{name}{end}", pa.float64()) for name in _SECONDS for end in ("_s", "_iqr_s")]
        + [("bandwidth_gbps", pa.float64()), ("samples", pa.int32())]
    )
    rows = [
        {"tokens": one.tokens, **_told(attention=one.attention, moe=one.moe, head=one.head, expert=one.expert)}
        for one in profile.compute
    ]
    rows += [{"tokens": one.tokens, "bits": one.bits, **_told(near=one.seconds)} for one in profile.near]
    rows += [
        {"link": one.link, "bandwidth_gbps": one.gbps}
        | _told(expert_load=one.seconds, miss=one.miss, host=one.host, latency=one.latency)
        for one in profile.loads
    ]
    always = {"device": profile.device, "bits": FULL_BITS}
    return pa.Table.from_pylist([dict.fromkeys(schema.names) | always | row for row in rows], schema=schema)


def from_rows(rows: "pa.Table", conditions: Mapping[str, object]) -> HardwareProfile:
    """What `to_rows` wrote."""
    compute, loads, near = [], [], []
    for row in rows.to_pylist():
        if row["link"] is not None:
            beside = {name: _spread(row, name) for name in _BESIDE if row.get(f"{name}_s") is not None}
            loads.append(Load(row["link"], _spread(row, "expert_load"), row["bandwidth_gbps"], **beside))
        elif row["near_s"] is not None:
            near.append(NearCompute(row["bits"], row["tokens"], _spread(row, "near")))
        else:
            parts = (_spread(row, name) for name in ("attention", "moe", "head", "expert"))
            compute.append(Compute(row["tokens"], *parts))
    return HardwareProfile(tuple(compute), tuple(loads), tuple(near), conditions)


def _told(**known: Spread | None) -> dict[str, float | int]:
    spreads = {name: spread for name, spread in known.items() if spread is not None}
    medians = {f"{name}_s": spread.median for name, spread in spreads.items()}
    ranges = {f"{name}_iqr_s": spread.iqr for name, spread in spreads.items()}
    return medians | ranges | {"samples": min(spread.samples for spread in spreads.values())}


def _spread(row: Mapping[str, object], name: str) -> Spread:
    told = row[f"{name}_s"], row[f"{name}_iqr_s"]
    if any(seconds is None or not 0 <= seconds < inf for seconds in told):
        raise BadInput(f"the hardware profile has {name} of {told[0]} s: {REMEDY} again")
    return Spread(*told, row["samples"])
