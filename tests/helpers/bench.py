"""Options of small benches, and an interruption of them by Ctrl-C, for the tests of `moectl
bench`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tests

TRACE = str(tests.TRACE)
LIVE = [
    "--data",
    "text.jsonl",
    "--tokens",
    "24",
    "--length",
    "12",
    "--rounds",
    "2",
    "--threads",
    "1",
]
FEW = ["--presets", "mixture-cache,promoe", "--budgets", "25%,50%", "--links", "5MB/s"]
SAME = [*LIVE, *FEW, "--seed", "5"]
REPLAY = ["--simulate", "--trace", TRACE, "--budgets", "25%", "--presets", "specmd"]
Benched = Callable[..., dict]


def write_text() -> None:
    lines = [
        json.dumps({"text": f"{number} sheep and an old dog by the gate"}) for number in range(4)
    ]
    Path("text.jsonl").write_text("\n".join(lines))


def interrupting(after: int) -> Callable[..., object]:
    """A progress bar that raises KeyboardInterrupt after `after` updates."""

    @contextmanager
    def bar(what: str, *, unit: str) -> Iterator[Callable[[int, int], None]]:
        told: list[int] = []

        def advance(done: int, total: int) -> None:
            told.append(done)
            if len(told) > after:
                raise KeyboardInterrupt

        yield advance

    return bar
