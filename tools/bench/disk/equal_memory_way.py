"""One program that decodes with less memory than the model has, in a process of its own.

python -m tools.bench.disk.equal_memory_way WAY TOKENS        WAY as JSON; tools.bench.disk.equal_memory compares them
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from profilers.compare.llama_cpp import LlamaCpp
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tools.bench.decoding.resident import PROMPT, decode_by_llama_cpp, decode_seconds
from tools.bench.disk.way import read_nbytes


@dataclass(frozen=True, slots=True)
class LimitedWay:
    """`path` is a checkpoint, or llama.cpp's file where there is no `budget`."""

    path: str
    budget: str = ""
    link: str = ""

    @property
    def label(self) -> str:
        return (
            f"moectl, {self.budget}, link {self.link}"
            if self.budget
            else "llama.cpp, its file mapped"
        )


@dataclass(frozen=True, slots=True)
class LimitedReading:
    """Seconds from before the model is opened until its first decoded token; then, of the same
    tokens once more, median seconds of a decoded one, and bytes that the device read for the prompt
    and all of them."""

    first_s: float
    token_s: float
    read_nbytes: int


def main() -> None:
    way = LimitedWay(**json.loads(sys.argv[1]))
    vocab_size = int(sys.argv[2])
    tokens = int(sys.argv[3])
    print(json.dumps(asdict(measure(way, vocab_size, tokens=tokens))))


def measure(way: LimitedWay, vocab_size: int, *, tokens: int) -> LimitedReading:
    """Decode with one thread, twice: one token after the prompt, then `tokens` of them."""
    torch.set_num_threads(1)
    ids = torch.randint(3, vocab_size, (1, PROMPT + tokens), generator=torch.manual_seed(0))
    with ExitStack() as stack:
        begin_s = time.perf_counter()
        decode = _opened(way, vocab_size, ids.shape[1], stack)
        decode(ids[:, : PROMPT + 1])
        first_s = time.perf_counter() - begin_s
        read = read_nbytes()
        seconds = decode(ids)
        return LimitedReading(first_s, median(seconds), read_nbytes() - read)


def _opened(
    way: LimitedWay, vocab_size: int, num_tokens: int, stack: ExitStack
) -> Callable[[torch.Tensor], Sequence[float]]:
    if not way.budget:
        llama = LlamaCpp(Path(way.path), threads=1, num_tokens=num_tokens, vocab_size=vocab_size)
        return lambda ids: decode_by_llama_cpp(llama, ids)
    settings = Settings(
        budget=way.budget, link=way.link, device="cpu", experts=FUSED, scope="global"
    )
    model = stack.enter_context(Session.open(way.path, settings)).opened.model
    return lambda ids: decode_seconds(model, ids)


if __name__ == "__main__":
    main()
