"""Decoding with experts on disk: moectl's disk link beside the two ways of Accelerate, page cache
cold and warm.

    python -m tools.bench.disk.accelerate

Each way is a process of its own that decodes the same tokens with one thread: first with the page
cache of its files dropped before every token, as the bytes read from the device prove, then with
everything in the page cache. Processes alternate in rounds, and ratios are taken within a round.
Weights other than experts stay in memory, except with `disk_offload`, which offloads the whole
model. Experts are in the fused layout, which Accelerate reads directly; without `--model` a random
checkpoint of OLMoE's shape is written to a temporary folder first (0.8 GB).
"""

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from moectl.show.render import Sheet, show_sheet
from runtime.model.files.checkpoint import open_checkpoint
from runtime.model.files.pack import pack
from runtime.model.open import open_model
from tools.arguments import parser_of
from tools.bench.decoding.resident import OLMOE_SHAPED, random_model
from tools.bench.disk.way import DEVICE_MAP, OURS, WHOLE_MODEL, Reading, Way, child
from tools.bench.measuring import in_turns, last_line, output_of

log = logging.getLogger("bench_disk")

PEERS = (Way(DEVICE_MAP), Way(WHOLE_MODEL))
# a token's experts of one layer: no more memory than Accelerate uses for pages of the file
SMALL = "8x"
WAYS = (
    *PEERS,
    Way(OURS, SMALL, "disk", "exact"),
    Way(OURS, SMALL, "direct", "exact"),
    Way(OURS, SMALL, "direct", "exact", is_packed=True),
    Way(OURS, SMALL, "disk", "fused"),
    Way(OURS, "25%", "disk", "exact"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one way over all rounds. `cold_times` and `warm_times` are the speed-up over the
    better of Accelerate's ways in the same round, with minimum and maximum."""

    way: str
    cold_ms: float
    cold_times: tuple[float, float, float]
    warm_ms: float
    warm_times: tuple[float, float, float]
    cold_mib: float
    warm_mib: float
    peak_mib: float


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with checkpoint(options.model) as folder:
        found = rows(folder, rounds=options.rounds, tokens=options.tokens)
    show_sheet(sheet(found, rounds=options.rounds, tokens=options.tokens))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


def checkpoint(given: Path | None) -> AbstractContextManager[Path]:
    """The folder given, or a random checkpoint in a temporary one."""
    return nullcontext(given) if given else random_model(*OLMOE_SHAPED, "--layout", "fused")


def rows(folder: Path, *, rounds: int, tokens: int, ways: Sequence[Way] = WAYS) -> list[Row]:
    """Measure every way on the checkpoint in `folder`, in rounds that each begin with another
    way."""
    found: dict[Way, list[Reading]] = {way: [] for way in ways}
    with _packed(folder, is_wanted=any(way.is_packed for way in ways)) as packed:
        for turn, way in in_turns(ways, rounds):
            found[way].append(in_process(way, packed if way.is_packed else folder, tokens=tokens))
            log.info("round %d: %s: %s", turn + 1, way.label, found[way][-1])
    peers = [found[way] for way in ways if way in PEERS]
    return [_row(way, readings, peers) for way, readings in found.items()]


@contextmanager
def _packed(folder: Path, *, is_wanted: bool) -> Iterator[Path]:
    """The same checkpoint packed, in a temporary folder that stays empty unless a way needs it."""
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as scratch:
        if is_wanted:
            pack(open_model(str(folder)), open_checkpoint(folder), Path(scratch) / "packed")
        yield Path(scratch) / "packed"


def sheet(found: Sequence[Row], *, rounds: int, tokens: int) -> Sheet:
    """The rows as a table."""
    columns = (
        "way",
        "cold, ms/token",
        "times",
        "MiB/token",
        "warm, ms/token",
        "times",
        "MiB/token",
        "peak, MiB",
    )
    cells = [
        (
            row.way,
            f"{row.cold_ms:.0f}",
            _times(row.cold_times),
            f"{row.cold_mib:.0f}",
            f"{row.warm_ms:.0f}",
            _times(row.warm_times),
            f"{row.warm_mib:.0f}",
            f"{row.peak_mib:.0f}",
        )
        for row in found
    ]
    title = "Experts on disk: page cache dropped before every token (cold), or all in it (warm)"
    note = (
        f"medians over {rounds} rounds of {tokens} tokens, batch 1, one thread, each way in a "
        "process of its own; times: how often a token goes into one of the better of "
        "Accelerate's ways, least to most over the rounds; MiB/token: read from the device; "
        "peak: resident while decoding"
    )
    return Sheet(title, columns, cells, note)


def _row(way: Way, readings: Sequence[Reading], peers: Sequence[Sequence[Reading]]) -> Row:
    in_turn = list(zip(readings, *peers, strict=True))
    middle = {
        name: statistics.median(getattr(one, name) for one in readings)
        for name in Reading.__slots__
    }
    return Row(
        way=way.label,
        cold_ms=middle["cold_s"] * 1e3,
        cold_times=_spread(
            [min(peer.cold_s for peer in others) / own.cold_s for own, *others in in_turn]
        ),
        warm_ms=middle["warm_s"] * 1e3,
        warm_times=_spread(
            [min(peer.warm_s for peer in others) / own.warm_s for own, *others in in_turn]
        ),
        cold_mib=middle["cold_nbytes"] / 2**20,
        warm_mib=middle["warm_nbytes"] / 2**20,
        peak_mib=middle["peak_nbytes"] / 2**20,
    )


def _spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(ratios), min(ratios), max(ratios)


def _times(spread: tuple[float, float, float]) -> str:
    middle, least, most = spread
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def in_process(way: Way, folder: Path, *, tokens: int) -> Reading:
    """Measure one way in a process of its own."""
    return Reading(**json.loads(last_line(output_of(*child("decode", way, folder, tokens)[1:]))))


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__,
        model=(Path, "a checkpoint in the fused layout"),
        rounds=5,
        tokens=(14, "decoded cold, then warm, by each way in each round"),
        json=(Path, "write the figures to this file as well"),
    ).parse_args()


if __name__ == "__main__":
    main()
