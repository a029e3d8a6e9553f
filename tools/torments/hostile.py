"""Generators of hostile files, and the check of their outcome: a result or a Problem, within limits
of time and memory.

All random choices use the generator that is passed in, so that a seed repeats a case.
"""

import json
import math
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from artifacts.errors import Problem
from tools.torments.cases import Lost

SECONDS = 30.0  # longer than any legitimate case
# address space beyond that of the process; allocators reserve far more than they use
NBYTES = 4 << 30
LONGEST = 12_000  # characters of a refusal, which may quote the input
NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**61,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
)
FRACTIONS = (0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "x",
    "0",
    "-1",
    "nan",
    "é",
    "\ud800",
    "\x00",
    "../x",
    "/etc/passwd",
    "a" * 5000,
    "{}",
    "F32",
    "I64",
)


class Hostile:
    """A torment of several kinds, each with its weight beside the others."""

    share = 3.0
    _kinds: dict[str, tuple[float, Callable[[random.Random], None]]]

    def one(self, rng: random.Random) -> str:
        kinds = list(self._kinds)
        kind = rng.choices(kinds, [self._kinds[name][0] for name in kinds])[0]
        self._kinds[kind][1](rng)
        return kind


def refusal(what: str, call: Callable[[], object]) -> Problem | None:
    """The Problem that `call` raised, None on success. Raises Lost for any other error, and for a
    late one."""
    try:
        with _bounded():
            call()
        return None
    except Problem as problem:
        told = str(problem)
        if not told.strip() or len(told) > LONGEST:
            raise Lost(f"{what}: the refusal has {len(told)} characters") from problem
        return problem
    except (KeyboardInterrupt, SystemExit, Lost):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        raise Lost(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four damages."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_DAMAGES)(data, rng)
    return data


def altered(value: object, rng: random.Random) -> object:
    """A copy of a JSON value with one to three of its parts replaced, removed, renamed or
    exchanged."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return odd(rng)
        _alter(*rng.choice(places), rng)
    return value


def odd(rng: random.Random) -> object:
    """An unusual value."""
    return rng.choice(
        (
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(FRACTIONS),
            lambda: rng.choice(TEXTS),
            lambda: rng.choice((None, True, False, [], {}, [[]], {"a": {"b": []}})),
            lambda: [rng.choice(NUMBERS) for _ in range(rng.randrange(6))],
        )
    )()


def as_text(value: object, rng: random.Random) -> str:
    """JSON text, sometimes with a duplicate key, deep nesting, or a number of thousands of
    digits."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    twist = rng.random()
    if twist < 0.05 and text.startswith("{") and len(text) > 2:
        return text[:-1] + "," + text[1:]
    if twist < 0.08:
        return text.replace("1", "9" * 5000, 1)
    if twist < 0.1:
        return "[" * 100_000 + text
    return text


def write(path: Path, content: str | bytes) -> Path:
    """Write a file; characters that UTF-8 cannot encode are kept as surrogates."""
    path.write_bytes(
        content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    )
    return path


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit the time and the memory of a case."""
    is_main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(signal.SIGALRM, _stop) if is_main else None
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + NBYTES, hard))
    try:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _TooLong(BaseException):
    """Derived from BaseException, so that no library catches it."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _TooLong(f"still busy after {SECONDS:g} s")


def _places(value: object) -> Iterator[tuple[dict | list, str | int]]:
    """Every place in a tree: its container, and its key or index there."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _alter(holder: dict | list, key: str | int, rng: random.Random) -> None:
    how = rng.random()
    if how < 0.6:
        holder[key] = odd(rng)
    elif how < 0.75:
        del holder[key]
    elif how < 0.85 and isinstance(holder, dict):
        holder[rng.choice(("x", "", "__metadata__", f"{key}x"))] = holder.pop(key)
    else:
        others = list(holder) if isinstance(holder, dict) else range(len(holder))
        other = rng.choice(list(others))
        holder[key], holder[other] = holder[other], holder[key]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _replaced(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    new = rng.choice(
        (
            b"\x00",
            b"\xff" * 8,
            b"-1",
            b"9" * 30,
            b'"',
            b"[",
            b"{}",
            b"\n",
            rng.randbytes(rng.randrange(9)),
        )
    )
    return data[:at] + new + data[at + rng.choice((0, len(new))) :]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _longer(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 100))


def _without(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(1, 64) :]


def _doubled(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    stop = start + rng.randrange(1, 64)
    return data[:stop] + data[start:]


def _of_another_length(data: bytes, rng: random.Random) -> bytes:
    """Change the first 8 bytes, which are a length in many formats."""
    length = rng.choice(
        (0, 1, 2, len(data), 2**20, 100 << 20, 2**32, 2**40, 2**63, 2**64 - 8, 2**64 - 1)
    )
    return length.to_bytes(8, "little") + data[8:]


_DAMAGES = (
    _flipped,
    _flipped,
    _replaced,
    _replaced,
    _cut,
    _longer,
    _without,
    _doubled,
    _of_another_length,
)
