"""Grounds of a time (a machine at hand, emulated proportions, virtual time), and the claims that
they allow."""

from dataclasses import dataclass

from artifacts.hardware.machines import HERE, MACHINES

# all routed experts together; below, launches and host work would decide, which no sheet has
TOY_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Grounds:
    """Grounds of times. `says` stands beside every table of them; unless `is_absolute` only their
    ratios mean anything."""

    says: str
    is_absolute: bool


def simulated(machine: str, experts_nbytes: int) -> Grounds:
    """Return the grounds of a replay on a named machine, of a model whose routed experts take
    `experts_nbytes` bytes.

    On data sheets a toy takes no time at all: everything fits many times over, and what a sheet
    leaves out is most of the time. Costs that were measured `here` hold for a model of any size.
    """
    if machine == HERE:
        return Grounds(
            "simulated on virtual time, at costs measured on this machine", is_absolute=True
        )
    says = f"simulated on virtual time, bandwidths of {machine}"
    is_toy = experts_nbytes < TOY_NBYTES
    return Grounds(
        says + (", a toy model: ratios only" if is_toy else ": lower bounds"),
        is_absolute=not is_toy,
    )


def measured(link: str, *, device: str = "cpu") -> Grounds:
    """Return the grounds of live runs over a link: the machine's own, an emulated rate, or the
    proportions of a named machine."""
    what = device.partition(":")[0].upper().replace("CUDA", "GPU")
    if link in MACHINES:
        return Grounds(f"{what}, in the proportions of {link}", is_absolute=False)
    return Grounds(
        f"measured on this {what}" + f" over an emulated link of {link}" * link[:1].isdigit(), True
    )


def compared(ratio: float) -> str:
    """A ratio of times in words: 3.45 -> `3.5 times slower`, 0.5 -> `2.0 times faster`."""
    more, word = (ratio, "slower") if ratio >= 1 else (1 / ratio, "faster")
    return f"{more:.1f} times {word}" if more >= 1.05 else "as fast"
