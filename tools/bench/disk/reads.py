"""Gain by concurrent reads and by a packed checkpoint: the experts of one token, with the page
cache and past it.

    python -m tools.bench.disk.reads

Reads top-k experts of every layer as the disk link's threads do, a layer's at a time, out of three
checkpoints of the same shape: fused, published, and packed from the fused one. All take turns in
one process: with the page cache of the files dropped before (cold), and again at once (warm). Past
the page cache both are the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from moectl.show.render import Sheet, show_sheet
from runtime.links.link import DEMAND, DiskLink
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.pack import pack
from runtime.model.layout import aligned
from runtime.model.open import MoeModel, open_model
from runtime.tiers.slow import SlowTier
from tools.arguments import parser_of
from tools.bench.decoding.resident import OLMOE_SHAPED, random_model
from tools.bench.measuring import drop, read_nbytes

IN_FLIGHT = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one layout over one link: milliseconds to load a token's experts, and CPU
    milliseconds for it.

    `cold_ratio` is relative to the fused layout over the disk link with one read at a time, in the
    same round.
    """

    layout: str
    link: str
    in_flight: int
    cold_ms: float
    cold_ratio: float
    cold_cpu_ms: float
    warm_ms: float
    warm_cpu_ms: float
    cold_mib: float


@dataclass(frozen=True, slots=True)
class _Taken:
    seconds: float
    cpu_s: float
    nbytes: int


_Pair = tuple[_Taken, _Taken]  # cold and warm


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    with layouts(*OLMOE_SHAPED) as folders:
        found = rows(folders, rounds=options.rounds)
    show_sheet(sheet(found, rounds=options.rounds))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


@contextmanager
def layouts(*shape: str) -> Iterator[dict[str, Path]]:
    """A random checkpoint in temporary folders, by layout; `shape` as tools.make.checkpoint takes
    it."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = {
            name: stack.enter_context(random_model(*shape, "--layout", name))
            for name in ("fused", "hub")
        }
        packed = pack(
            open_model(str(found["fused"])), open_checkpoint(found["fused"]), scratch / "packed"
        )
        yield {"fused": found["fused"], "published": found["hub"], "packed": packed.folder}


def rows(folders: dict[str, Path], *, rounds: int) -> list[Row]:
    """Measure each layout over both links in alternating rounds; the first round warms up."""
    names = [
        (name, link, count)
        for name in folders
        for link in ("disk", "direct")
        for count in IN_FLIGHT
    ]
    ways = [_Way(folders[name], link, count) for name, link, count in names]
    found: list[list[_Pair]] = [[] for _ in ways]
    random = np.random.default_rng(0)
    for turn in range(rounds + 1):
        for index in random.permutation(len(ways)).tolist():
            pair = ways[index].cold_and_warm(random)
            found[index] += [pair] if turn else []
    for way in ways:
        way.close()
    return [_row(name, taken, found[0]) for name, taken in zip(names, found, strict=True)]


class _Way:
    """One folder over one link, with slots for a token's experts."""

    def __init__(self, folder: Path, link: str, num_threads: int) -> None:
        self._folder = folder
        self._opened = open_model(str(folder))
        store = self._opened.store.direct() if link == "direct" else self._opened.store
        shape = self._opened.shape
        self._link = DiskLink(SlowTier.plain(store), shape, num_threads=num_threads)
        self._slots = [aligned(shape.expert_nbytes) for _ in range(shape.top_k)]
        # checked once
        self._bring(_experts(self._opened, np.random.default_rng(0), shape.num_experts))

    def cold_and_warm(self, random: np.random.Generator) -> _Pair:
        wanted = _experts(self._opened, random, self._opened.shape.top_k)
        drop(self._folder)
        return self._bring(wanted), self._bring(wanted)

    def close(self) -> None:
        self._link.close()
        self._opened.store.close()

    def _bring(self, wanted: Sequence[Sequence[int]]) -> _Taken:
        """The keys of each layer, issued together and collected in turn, as a step does."""
        nbytes = read_nbytes()
        cpu_s = time.process_time()
        begin_s = time.perf_counter()
        for keys in wanted:
            slots = [self._slots[index % len(self._slots)] for index in range(len(keys))]
            for transfer in [
                self._link.issue(*pair, urgency=DEMAND) for pair in zip(keys, slots, strict=True)
            ]:
                self._link.collect(transfer)
        return _Taken(
            time.perf_counter() - begin_s, time.process_time() - cpu_s, read_nbytes() - nbytes
        )


def _experts(opened: MoeModel, random: np.random.Generator, count: int) -> list[list[int]]:
    """Return the keys of `count` random experts of each layer."""
    size = opened.shape.num_experts
    layers = range(opened.shape.num_layers)
    return [
        [layer * size + int(own) for own in random.choice(size, count, replace=False)]
        for layer in layers
    ]


def _row(way: tuple[str, str, int], taken: Sequence[_Pair], usual: Sequence[_Pair]) -> Row:
    cold, warm = zip(*taken, strict=True)
    ratios = [own.seconds / other.seconds for own, (other, _) in zip(cold, usual, strict=True)]
    return Row(
        layout=way[0],
        link=way[1],
        in_flight=way[2],
        cold_ms=statistics.median(one.seconds for one in cold) * 1e3,
        cold_ratio=statistics.median(ratios),
        cold_cpu_ms=statistics.median(one.cpu_s for one in cold) * 1e3,
        warm_ms=statistics.median(one.seconds for one in warm) * 1e3,
        warm_cpu_ms=statistics.median(one.cpu_s for one in warm) * 1e3,
        cold_mib=statistics.median(one.nbytes for one in cold) / 2**20,
    )


def sheet(found: Sequence[Row], *, rounds: int) -> Sheet:
    """The rows as a table."""
    columns = (
        "layout",
        "link",
        "in flight",
        "cold, ms",
        "ratio",
        "CPU, ms",
        "warm, ms",
        "CPU, ms",
        "cold, MiB",
    )
    cells = [
        (
            row.layout,
            row.link,
            row.in_flight,
            f"{row.cold_ms:.0f}",
            f"{row.cold_ratio:.2f}",
            f"{row.cold_cpu_ms:.0f}",
            f"{row.warm_ms:.0f}",
            f"{row.warm_cpu_ms:.0f}",
            f"{row.cold_mib:.0f}",
        )
        for row in found
    ]
    note = (
        f"medians over {rounds} rounds in which all take turns; the experts of one token; ratio: "
        "of cold reading to the first row's in the same round; MiB read from the device"
    )
    return Sheet("Reading a token's experts", columns, cells, note)


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__, rounds=40, json=(Path, "write the figures to this file as well")
    ).parse_args()


if __name__ == "__main__":
    main()
