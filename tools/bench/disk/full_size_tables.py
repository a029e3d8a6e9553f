"""Tables of the results of the rehearsal in full size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.bench.disk.full_size_process import Cell, FullSizeMeasurement, Opening, Prompted
from tools.bench.performance import Table

_GIB = 1 << 30
MOST_OPENING_S = 15
MOST_BESIDES_GIB = 2.5
LEAST_COLD = 0.8
LEAST_WARM = 0.6


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """All that was measured of one model. `planned` is what `moectl plan` says of it, `profile_s`
    the seconds of `moectl profile --trace` over `profiled` tokens."""

    files_nbytes: int
    measured: FullSizeMeasurement
    planned: Mapping
    profile_s: float
    profiled: int


def tables(found: Rehearsal) -> list[Table]:
    opening = found.measured.opening
    cells = found.measured.cells
    return [
        _opening(opening, found.files_nbytes),
        _cold(cells, opening),
        _warm(cells),
        _long(found.measured.prompt, profile_s=found.profile_s, profiled=found.profiled),
        _plan(found),
    ]


def _opening(opening: Opening, files_nbytes: int) -> Table:
    besides = opening.peak_nbytes - opening.dense_nbytes
    return Table(
        "Opening",
        (
            "GB of files",
            "tensors",
            "seconds",
            "peak resident, GiB",
            "of it weights besides experts",
            "of it all else",
        ),
        [
            (
                f"{files_nbytes / 1e9:.1f}",
                f"{opening.num_tensors:,}",
                f"{opening.seconds:.1f}",
                f"{opening.peak_nbytes / _GIB:.2f}",
                f"{opening.dense_nbytes / _GIB:.2f}",
                f"{besides / _GIB:.2f}",
            )
        ],
        "the page cache of the files dropped before, imports not counted; to reach: "
        f"{MOST_OPENING_S} s for 31 GB, {MOST_BESIDES_GIB} GiB of all else",
    )


def _cold(cells: Sequence[Cell], opening: Opening) -> Table:
    columns = (
        "budget",
        "slots, GiB",
        "hits",
        "ms/token",
        "of it waiting",
        "MiB/token",
        "MiB/token of the device",
    )
    columns += (
        "GB/s",
        "reads alone",
        "share",
        "share of the token",
        "past the cache",
        "all else, GiB",
    )
    rows = []
    for cell in cells:
        cold = cell.cold
        besides = cell.peak_nbytes - cell.slots_nbytes - opening.dense_nbytes
        rows.append(
            (
                cell.budget,
                f"{cell.slots_nbytes / _GIB:.2f}",
                f"{cell.hit_rate:.0%}",
                f"{cold.seconds * 1e3:.0f}",
                f"{cold.waited_s * 1e3:.0f}",
                f"{cold.loaded_nbytes / 2**20:.0f}",
                f"{cold.read_nbytes / 2**20:.0f}",
                f"{cold.rate / 1e9:.2f}",
                f"{cold.beside / 1e9:.2f}",
                f"{cold.rate / cold.beside:.0%}",
                f"{cold.loaded_nbytes / cold.seconds / cold.beside:.0%}",
                f"{cell.direct_rate / 1e9:.2f}" if cell.direct_rate else "-",
                f"{besides / _GIB:.2f}",
            )
        )
    note = (
        "medians; the page cache dropped before every token; GB/s while at least one read was "
        "under way; reads alone: the same by themselves right after, in plain threads, as many "
        "in flight, and past the page cache; share of the token: with its computing; to reach: a "
        f"share of {LEAST_COLD:.0%}, {MOST_BESIDES_GIB} GiB of all else"
    )
    return Table("Decoding, cold", columns, rows, note)


def _warm(cells: Sequence[Cell]) -> Table:
    rows = [
        (
            cell.budget,
            f"{cell.warm.seconds * 1e3:.0f}",
            f"{cell.warm.waited_s * 1e3:.0f}",
            f"{cell.warm.loaded_nbytes / 2**20:.0f}",
            f"{cell.warm.read_nbytes / 2**20:.0f}",
            f"{cell.warm.rate / 1e9:.2f}",
            f"{cell.warm.beside / 1e9:.2f}",
            f"{cell.warm.rate / cell.warm.beside:.0%}",
        )
        for cell in cells
    ]
    columns = (
        "budget",
        "ms/token",
        "of it waiting",
        "MiB/token",
        "MiB/token of the device",
        "GB/s",
        "a copy",
        "share",
    )
    note = (
        "medians over the same tokens; what a token loads was in the page cache before it; a "
        "copy: of as many bytes as an expert has, from memory to memory, by one thread; to "
        f"reach: a share of {LEAST_WARM:.0%}"
    )
    return Table("Decoding, warm", columns, rows, note)


def _long(prompt: Prompted, *, profile_s: float, profiled: int) -> Table:
    loaded = f"{prompt.loaded_nbytes / _GIB:.1f}"
    rows = [
        (
            f"prompt, {prompt.tokens} tokens",
            f"{prompt.seconds:.1f}",
            f"{prompt.waited_s:.1f}",
            loaded,
        ),
        (f"`moectl profile --trace`, {profiled} tokens", f"{profile_s:.1f}", "", ""),
    ]
    note = (
        f"both at a budget of {prompt.budget}; the page cache dropped before the prompt; the "
        "profile's are the seconds of the whole command"
    )
    return Table(
        "More tokens at once", ("what", "seconds", "of it waiting", "GiB loaded"), rows, note
    )


def _plan(found: Rehearsal) -> Table:
    memory = found.planned["memory"]
    opening = found.measured.opening
    pairs = [
        ("all experts", memory["all_experts_nbytes"], opening.expert_nbytes),
        (
            "other weights in the files",
            memory["stored_weights_nbytes"],
            found.files_nbytes - opening.expert_nbytes,
        ),
        ("other weights in memory", memory["weights_nbytes"], opening.dense_nbytes),
    ]
    rows = [
        (what, f"{said:,.0f}", f"{real:,.0f}", f"{said / real - 1:+.1%}")
        for what, said, real in pairs
    ]
    note = "what `moectl plan` reads from the config alone; in memory other weights are dequantised"
    return Table("Planned and measured", ("bytes", "planned", "measured", "difference"), rows, note)
