"""One way to use experts on disk, in a process of its own that imports only what this way needs.

    python -m tools.bench.disk.way decode WAY MODEL TOKENS           WAY as JSON, by accelerate.py
    python -m tools.bench.disk.way twice WAY MODEL VOCABULARY TOKENS by equal_memory.py

`decode`: every token with the page cache of the files dropped before it, then every token with all
in the page cache.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tools.bench.measuring import drop, files_of, forget_peak, peak_nbytes, read_nbytes

# tokens; the first of the decoded ones, cold or warm, do not count
PROMPT = 16
WARM_UP = 2
DEVICE_MAP = "accelerate, device_map disk"
WHOLE_MODEL = "accelerate, disk_offload"
OURS = "moectl"
LLAMA_CPP = "llama.cpp, its file mapped"


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


@dataclass(frozen=True, slots=True)
class TwiceReading:
    """Seconds from before the model is opened until its first decoded token; then, of the same
    tokens once more, median seconds of a decoded one, and bytes that the device read for the prompt
    and all of them."""

    first_s: float
    token_s: float
    read_nbytes: int


def main() -> None:
    kind, way, path, *numbers = sys.argv[1:]
    measures = {"decode": measure, "twice": measure_twice}
    found = measures[kind](Way(**json.loads(way)), Path(path), *map(int, numbers))
    print(json.dumps(asdict(found)))


def child(kind: str, way: Way, path: Path, *numbers: int) -> list[str]:
    """Return the arguments of Python that measure `way` so."""
    return [
        "-m",
        "tools.bench.disk.way",
        kind,
        json.dumps(asdict(way)),
        str(path),
        *map(str, numbers),
    ]


def measure(way: Way, folder: Path, tokens: int) -> Reading:
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


def measure_twice(way: Way, path: Path, vocab_size: int, tokens: int) -> TwiceReading:
    """Decode with one thread, twice: one token after the prompt, then `tokens` of them."""
    import torch

    from profilers.compare.llama_cpp import LlamaCpp
    from tools.bench.decoding.resident import decode_by_llama_cpp, decode_seconds

    torch.set_num_threads(1)
    ids = torch.randint(3, vocab_size, (1, PROMPT + tokens), generator=torch.manual_seed(0))
    with ExitStack() as stack:
        begin_s = time.perf_counter()
        if way.name == LLAMA_CPP:
            llama = LlamaCpp(path, threads=1, num_tokens=ids.shape[1], vocab_size=vocab_size)
            decode = partial(decode_by_llama_cpp, llama)
        else:
            session = stack.enter_context(open_way(way, path, path))
            decode = partial(decode_seconds, session.opened.model)
        decode(ids[:, : PROMPT + 1])
        first_s = time.perf_counter() - begin_s
        read = read_nbytes()
        seconds = decode(ids)
        return TwiceReading(first_s, statistics.median(seconds), read_nbytes() - read)


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


def _keep(*folders: Path) -> None:
    """Read all files of these folders into the page cache."""
    for path in files_of(folders):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


if __name__ == "__main__":
    main()
