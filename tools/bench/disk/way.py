"""One way to decode with experts on disk, in a process of its own that imports only what this way
needs.

    python -m tools.bench.disk.way WAY MODEL TOKENS        WAY as JSON; tools.bench.disk.accelerate compares them

Every token is decoded with the page cache of the files dropped before it, then every token with all
in the page cache.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

# tokens; the first of the decoded ones, cold or warm, do not count
PROMPT = 16
WARM_UP = 2
DEVICE_MAP = "accelerate, device_map disk"
WHOLE_MODEL = "accelerate, disk_offload"
OURS = "moectl"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: a name from above and, for moectl, budget, link, computation of experts,
    preset and scope."""

    name: str
    budget: str = ""
    link: str = "disk"
    experts: str = "eager"
    is_packed: bool = False  # from a checkpoint that `moectl pack` has rewritten
    preset: str = "on-demand"
    scope: str | None = "global"  # None: the preset's own

    @property
    def label(self) -> str:
        packed = ", packed" if self.is_packed else ""
        return (
            f"{self.name}, {self.budget}, link {self.link}, {self.experts}{packed}"
            if self.budget
            else self.name
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """One process: median seconds of a token and mean bytes read from the device for it, cold and
    warm; `peak_nbytes` is its peak resident memory while decoding."""

    cold_s: float
    warm_s: float
    cold_nbytes: float
    warm_nbytes: float
    peak_nbytes: int


def main() -> None:
    way, folder, tokens = sys.argv[1:]
    print(json.dumps(asdict(measure(Way(**json.loads(way)), Path(folder), tokens=int(tokens)))))


def measure(way: Way, folder: Path, *, tokens: int) -> Reading:
    """Decode, every token cold, then every token warm."""
    import torch

    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="bench-disk-") as scratch,
        open_way(way, folder, Path(scratch)) as opened,
    ):
        model = opened.opened.model if way.name == OURS else opened
        gc.collect()
        os.sync()  # dirty pages cannot be dropped
        forget_peak()
        cold_s, cold_nbytes = _decode(model, tokens, before=lambda: drop(folder, Path(scratch)))
        _keep(folder, Path(scratch))
        warm_s, warm_nbytes = _decode(model, tokens, before=lambda: None)
        return Reading(cold_s, warm_s, cold_nbytes, warm_nbytes, peak_nbytes())


def _decode(model: object, tokens: int, *, before: Callable[[], None]) -> tuple[float, float]:
    """Median seconds and mean bytes read of a token; `before` is called before each token and not
    measured."""
    import torch

    ids = torch.randint(
        3, model.config.vocab_size, (1, PROMPT + WARM_UP + tokens), generator=torch.manual_seed(0)
    )
    with torch.inference_mode():
        past = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
        seconds = []
        nbytes = []
        for position in range(PROMPT, ids.shape[1]):
            before()
            token = ids[:, position : position + 1]
            read = read_nbytes()
            begin_s = time.perf_counter()
            past = model(input_ids=token, past_key_values=past, use_cache=True).past_key_values
            seconds.append(time.perf_counter() - begin_s)
            nbytes.append(read_nbytes() - read)
    return statistics.median(seconds[WARM_UP:]), statistics.mean(nbytes[WARM_UP:])


@contextmanager
def open_way(way: Way, folder: Path, scratch: Path) -> Iterator[object]:
    """A session for moectl, else the model, ready to decode; `scratch` is where Accelerate may
    write."""
    if way.name == OURS:
        from runtime.session.session import Session, Settings

        settings = Settings(
            preset=way.preset,
            budget=way.budget,
            scope=way.scope,
            link=way.link,
            device="cpu",
            experts=way.experts,
        )
        with Session.open(str(folder), settings) as session:
            yield session
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
    """A device map with the experts' modules on disk and all others in memory, in as few entries as
    possible."""
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
    """Drop the files of these folders from the page cache, unless a process has them mapped."""
    for path in _files(folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _keep(*folders: Path) -> None:
    """Read all files of these folders into the page cache."""
    for path in _files(folders):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


def _files(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.iterdir() if path.is_file()]


def read_nbytes() -> int:
    """Bytes that the device has read for this process so far."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
