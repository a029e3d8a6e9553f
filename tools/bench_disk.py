"""Decoding with experts on disk: moectl's disk link beside the two ways of Accelerate, page cache cold and warm.

    python -m tools.bench_disk

Each way is a process of its own that decodes the same tokens with one thread: first with the page cache of its files
dropped before every token, which the bytes read from the device prove, then with everything in the page cache.
Processes take turns in rounds, and a ratio is that of one round. Weights that are no experts stay in memory, but for
`disk_offload`, which takes the whole model. Experts lie in the fused layout, the one that Accelerate reads without
rewriting it; without `--model` a random checkpoint of OLMoE's shape is written to a temporary folder first (0.8 GB).
"""

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moectl.render import Sheet

ROOT = Path(__file__).parent.parent
PROMPT, WARM_UP = 16, 2  # tokens; of those decoded, cold or warm, the first do not count
DEVICE_MAP, WHOLE_MODEL, OURS = "accelerate, device_map disk", "accelerate, disk_offload", "moectl"

log = logging.getLogger("bench_disk")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: a name of above; of moectl also its budget, its link and how it computes experts."""

    name: str
    budget: str = ""
    link: str = "disk"
    experts: str = "eager"
    is_packed: bool = False  # from a checkpoint that `moectl pack` has rewritten

    @property
    def label(self) -> str:
        packed = ", packed" if self.is_packed else ""
        return f"{self.name}, {self.budget}, link {self.link}, {self.experts}{packed}" if self.budget else self.name


PEERS = (Way(DEVICE_MAP), Way(WHOLE_MODEL))
SMALL = "8x"  # a token's experts of one layer: no more memory than Accelerate takes for pages of the file
WAYS = (
    *PEERS,
    Way(OURS, SMALL, "disk", "exact"),
    Way(OURS, SMALL, "direct", "exact"),
    Way(OURS, SMALL, "direct", "exact", is_packed=True),
    Way(OURS, SMALL, "disk", "fused"),
    Way(OURS, "25%", "disk", "exact"),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One process: median seconds of a token and mean bytes of the device for it, cold and warm; `peak_nbytes`: the
    most memory that was resident while it decoded."""

    cold_s: float
    warm_s: float
    cold_nbytes: float
    warm_nbytes: float
    peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One way over all rounds, medians. `cold_times`, `warm_times`: how often its token goes into one of the better of
    Accelerate's ways in the same round, with the least and the most."""

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
    if options.measure:
        print(json.dumps(asdict(measure(Way(**json.loads(options.measure)), options.model, tokens=options.tokens))))
        return
    from moectl.render import show_sheet

    with checkpoint(options.model) as folder:
        found = rows(folder, rounds=options.rounds, tokens=options.tokens)
    show_sheet(sheet(found, rounds=options.rounds, tokens=options.tokens))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


# In the process that compares


def checkpoint(given: Path | None) -> AbstractContextManager[Path]:
    """The folder given, or a random checkpoint in a temporary one."""
    from tools.bench_resident import OLMOE_SHAPED, random_model

    return nullcontext(given) if given else random_model(*OLMOE_SHAPED, "--layout", "fused")


def rows(folder: Path, *, rounds: int, tokens: int, ways: Sequence[Way] = WAYS) -> list[Row]:
    """Measure every way on the checkpoint in `folder`, in rounds that take turns; each begins with another."""
    found: dict[Way, list[Reading]] = {way: [] for way in ways}
    with _packed(folder, is_wanted=any(way.is_packed for way in ways)) as packed:
        for turn in range(rounds):
            start = turn % len(ways)
            for way in (*ways[start:], *ways[:start]):
                found[way].append(in_process(way, packed if way.is_packed else folder, tokens=tokens))
                log.info("round %d: %s: %s", turn + 1, way.label, found[way][-1])
    peers = [found[way] for way in ways if way in PEERS]
    return [_row(way, readings, peers) for way, readings in found.items()]


@contextmanager
def _packed(folder: Path, *, is_wanted: bool) -> Iterator[Path]:
    """The same checkpoint packed, in a temporary folder; nothing there unless it is wanted."""
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as scratch:
        if is_wanted:
            from runtime.checkpoint import open_checkpoint
            from runtime.model import open_model
            from runtime.repack import pack

            pack(open_model(str(folder)), open_checkpoint(folder), Path(scratch) / "packed")
        yield Path(scratch) / "packed"


def sheet(found: Sequence[Row], *, rounds: int, tokens: int) -> "Sheet":
    """The table of a report."""
    from moectl.render import Sheet

    columns = ("way", "cold, ms/token", "times", "MiB/token", "warm, ms/token", "times", "MiB/token", "peak, MiB")
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
        f"medians over {rounds} rounds of {tokens} tokens, batch 1, one thread, each way in a process of its own; "
        "times: how often a token goes into one of the better of Accelerate's ways, least to most over the rounds; "
        "MiB/token: read from the device; peak: resident while decoding"
    )
    return Sheet(title, columns, cells, note)


def _row(way: Way, readings: Sequence[Reading], peers: Sequence[Sequence[Reading]]) -> Row:
    in_turn = list(zip(readings, *peers, strict=True))
    middle = {name: statistics.median(getattr(one, name) for one in readings) for name in Reading.__slots__}
    return Row(
        way=way.label,
        cold_ms=middle["cold_s"] * 1e3,
        cold_times=_spread([min(peer.cold_s for peer in others) / own.cold_s for own, *others in in_turn]),
        warm_ms=middle["warm_s"] * 1e3,
        warm_times=_spread([min(peer.warm_s for peer in others) / own.warm_s for own, *others in in_turn]),
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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    asked = ["--measure", json.dumps(asdict(way)), "--model", str(folder), "--tokens", str(tokens)]
    command = [sys.executable, "-m", "tools.bench_disk", *asked]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{way.label} failed")
    return Reading(**json.loads(done.stdout.strip().rpartition("\n")[2]))


# In a process of its own, which imports nothing that its way has no need of


def measure(way: Way, folder: Path, *, tokens: int) -> Reading:
    """Decode, every token cold, then every token warm."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-disk-") as scratch, _opened(way, folder, Path(scratch)) as model:
        gc.collect()
        os.sync()  # what is still to be written cannot be dropped
        _forget_peak()
        cold_s, cold_nbytes = _decode(model, tokens, before=lambda: drop(folder, Path(scratch)))
        _keep(folder, Path(scratch))
        warm_s, warm_nbytes = _decode(model, tokens, before=lambda: None)
        return Reading(cold_s, warm_s, cold_nbytes, warm_nbytes, _peak_nbytes())


def _decode(model: object, tokens: int, *, before: Callable[[], None]) -> tuple[float, float]:
    """Median seconds and mean bytes of the device of a token; `before` comes before each and is not measured."""
    import torch

    ids = torch.randint(3, model.config.vocab_size, (1, PROMPT + WARM_UP + tokens), generator=torch.manual_seed(0))
    with torch.inference_mode():
        past = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
        seconds, nbytes = [], []
        for position in range(PROMPT, ids.shape[1]):
            before()
            token, read, begin_s = ids[:, position : position + 1], read_nbytes(), time.perf_counter()
            past = model(input_ids=token, past_key_values=past, use_cache=True).past_key_values
            seconds.append(time.perf_counter() - begin_s)
            nbytes.append(read_nbytes() - read)
    return statistics.median(seconds[WARM_UP:]), statistics.mean(nbytes[WARM_UP:])


@contextmanager
def _opened(way: Way, folder: Path, scratch: Path) -> Iterator[object]:
    """The model, ready to decode; `scratch` is where Accelerate may write."""
    if way.name == OURS:
        from runtime.session import Session, Settings

        settings = Settings(budget=way.budget, scope="global", link=way.link, device="cpu", experts=way.experts)
        with Session.open(str(folder), settings) as session:
            yield session.opened.model
        return
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    options = {"experts_implementation": way.experts, "dtype": "auto"}
    if way.name == DEVICE_MAP:
        options |= {"device_map": _experts_on_disk(folder), "offload_folder": str(scratch)}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if way.name == WHOLE_MODEL:
        from accelerate import disk_offload

        disk_offload(model, str(scratch), execution_device="cpu")
    yield model


def _experts_on_disk(folder: Path) -> dict[str, str]:
    """A device map: the experts' modules on disk, all others in memory, each as large as it can be."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    names = [name for name, _ in model.named_modules()]
    experts = {name for name in names if name.endswith(".experts")}
    places: dict[str, str] = {}
    for name in names:
        is_placed = any(name.startswith(f"{placed}.") for placed in places)
        holds_experts = not name or any(own.startswith(f"{name}.") for own in experts)
        if not is_placed and not holds_experts:
            places[name] = "disk" if name in experts else "cpu"
    return places


def drop(*folders: Path) -> None:
    """Have the operating system forget the files of these folders, as long as nobody has them mapped."""
    for path in _files(folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _keep(*folders: Path) -> None:
    """Have them all in the page cache."""
    for path in _files(folders):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def _files(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir() if path.is_file()]


def read_nbytes() -> int:
    """Bytes that this process had the device read so far."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint in the fused layout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=14, help="decoded cold, then warm, by each way in each round")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
