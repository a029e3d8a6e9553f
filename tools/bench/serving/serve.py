"""Concurrent clients of a server: every token is compared with a run alone, and the cost of sharing
is measured.

    python -m tools.bench.serving.serve              200 requests of 8 clients on the bundled model, some of which leave
    python -m tools.bench.serving.serve --presets near,horizon --requests 60 --leave 0.3
    python -m tools.bench.serving.serve --batch 8 --float32     in shared passes, in float32: every answer is a run's
    python -m tools.bench.serving.serve --batch 8               in bfloat16: how many are not
    python -m tools.bench.serving.serve --batch 8 --rounds 3 --requests 64 --leave 0     both ways by turns: speed

The server is a process of its own, its clients are OpenAI's. Exits 1 where an answer is lost, or
where a token differs that may not: in turns and in float32.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx2
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from moectl.bundled import demo_model
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.opening import existing
from moectl.show.render import Sheet, show_sheet
from runtime.control.counters import hit_rate
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.arguments import parser_of
from tools.bench.serving.servers import long_texts, serving

_URL = "http://127.0.0.1:{}"
OWN = {"temperature": 0, "extra_body": {"ignore_eos": True, "counters": True}}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; `leaves` is the number of pieces after which the client disconnects, if it
    does."""

    prompt: str
    num_tokens: int
    leaves: int | None


@dataclass(frozen=True, slots=True)
class Told:
    token_ids: list[int] | None  # None if the client left
    ttft_ms: float


def main() -> int:
    options = _options()
    asked = _requests(options)
    with tempfile.TemporaryDirectory() as folder:
        model = in_float32(Path(folder) / "demo") if options.float32 else demo_model()
        if options.rounds:
            show_sheet(_speeds(asked, model, options))
            return 0
        rows = []
        is_sound = True
        for preset in options.presets.split(","):
            row, sound = _compared(asked, model, preset, options)
            rows.append(row)
            is_sound &= sound
    columns = (
        "preset",
        "answered",
        "equal",
        "left",
        "lost",
        "tok/s alone",
        "served",
        "hits alone",
        "served",
    )
    show_sheet(Sheet("Served and alone", (*columns, "ttft ms"), rows, _note(options)))
    return 0 if is_sound else 1


def _note(options: argparse.Namespace) -> str:
    way = f"--batch {options.batch}" if options.batch > 1 else f"{options.clients} in turns"
    dtype = "float32" if options.float32 else "bfloat16"
    return (
        f"{options.requests} requests of {options.clients} clients, {way}, {dtype}, seed "
        f"{options.seed}"
    )


def _compared(
    asked: list[Asked], model: Path, preset: str, options: argparse.Namespace
) -> tuple[tuple, bool]:
    expected, alone_rate, alone_s = _alone(asked, model, preset, options)
    with serving(model, preset=preset, batch=options.batch, budget=options.budget) as (_, port):
        url = _URL.format(port)
        told, seconds = _load(asked, url, options.clients)
        counted = httpx2.get(f"{url}/live").json()
    row, is_equal, num_lost = _row(preset, asked, told, expected)
    speeds = (
        f"{sum(map(len, expected)) / alone_s:.1f}",
        f"{counted['generated_tokens'] / seconds:.1f}",
    )
    rates = f"{alone_rate:.3f}", f"{hit_rate(counted['counters']):.3f}"
    may_differ = options.batch > 1 and not options.float32
    is_sound = (is_equal or may_differ) and num_lost == counted["requests"]["failed"] == 0
    return (*row, *speeds, *rates, f"{median(one.ttft_ms for one in told):.0f}"), is_sound


def _speeds(asked: list[Asked], model: Path, options: argparse.Namespace) -> Sheet:
    """Both ways by turns, round by round, each by one client and by all."""
    ways = {"turns": 1, f"--batch {options.batch}": options.batch}
    speeds: dict[tuple[str, int], list[float]] = {}
    first_ms: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as servers:
        at = {
            name: servers.enter_context(
                serving(model, preset=options.presets, batch=batch, budget=options.budget)
            )[1]
            for name, batch in ways.items()
        }
        for _ in range(options.rounds):
            for num_clients in (1, options.clients):
                for name, port in at.items():
                    some = asked if num_clients > 1 else asked[: len(asked) // 4]
                    told, seconds = _load(some, _URL.format(port), num_clients)
                    key = name, num_clients
                    num_tokens = sum(len(one.token_ids or ()) for one in told)
                    speeds.setdefault(key, []).append(num_tokens / seconds)
                    first_ms.setdefault(key, []).extend(one.ttft_ms for one in told)
    base = median(speeds["turns", options.clients])
    rows = [
        (
            name,
            num_clients,
            f"{median(speeds[name, num_clients]):.1f}",
            f"{median(speeds[name, num_clients]) / base:.2f}",
            f"{_quantile(first_ms[name, num_clients], 0.5):.0f}",
            f"{_quantile(first_ms[name, num_clients], 0.95):.0f}",
            f"{_quantile(first_ms[name, num_clients], 0.95) / _quantile(first_ms[name, 1], 0.95):.2f}",
        )
        for name, num_clients in speeds
    ]
    columns = (
        "way",
        "clients",
        "tok/s",
        "of turns",
        "ttft p50 ms",
        "p95 ms",
        "p95 of one client's",
    )
    return Sheet(f"In {options.rounds} rounds by turns", columns, rows, _note(options))


def in_float32(path: Path) -> Path:
    """A copy of the bundled model whose weights are float32."""
    shutil.copytree(demo_model(), path)
    weights = load_file(path / "model.safetensors")
    save_file(
        {name: weight.float() for name, weight in weights.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return path


def _row(
    preset: str, asked: list[Asked], told: list[Told], expected: list[list[int]]
) -> tuple[tuple, bool, int]:
    kept = [
        (one.token_ids, ids)
        for one, ids in zip(told, expected, strict=True)
        if one.token_ids is not None
    ]
    num_equal = sum(ours == alone for ours, alone in kept)
    gone = [
        one.leaves is not None
        for one, heard in zip(asked, told, strict=True)
        if heard.token_ids is None
    ]
    num_left = sum(gone)
    num_lost = len(gone) - sum(gone)
    return (preset, len(kept), num_equal, num_left, num_lost), num_equal == len(kept), num_lost


def _requests(options: argparse.Namespace) -> list[Asked]:
    rng = random.Random(options.seed)
    texts = long_texts()
    asked = []
    for _ in range(options.requests):
        text = rng.choice(texts)
        begin = rng.randrange(len(text) - 150)
        length = rng.randrange(20, 150)
        leaves = rng.randrange(1, 8) if rng.random() < options.leave else None
        asked.append(
            Asked(
                text[begin : begin + length].strip() or "x",
                rng.randrange(8, options.tokens + 1),
                leaves,
            )
        )
    return asked


def _alone(
    asked: list[Asked], model: Path, preset: str, options: argparse.Namespace
) -> tuple[list[list[int]], float, float]:
    """The answers of `moectl run`, one after the other."""
    settings = Settings(preset=preset, budget=options.budget, threads=1)
    with Session.open(str(model), settings, store=existing(DEFAULT_STORE)) as session:
        begin_s = time.perf_counter()
        ids = [
            [token.token_id for token in session.tokens(session.encode(one.prompt), _sampling(one))]
            for one in asked
        ]
        return ids, hit_rate(session.controller.counters.totals()), time.perf_counter() - begin_s


def _sampling(one: Asked) -> Sampling:
    return Sampling(max_new_tokens=one.num_tokens, ignore_eos=True)


def _load(asked: list[Asked], url: str, num_clients: int) -> tuple[list[Told], float]:
    """Send all requests; return what the clients were told, and the seconds that it took."""
    begin_s = time.perf_counter()
    return asyncio.run(_clients(asked, url, num_clients)), time.perf_counter() - begin_s


async def _clients(asked: list[Asked], url: str, num_clients: int) -> list[Told]:
    """Run clients that each send the next request as soon as they have an answer."""
    told: list[Told | None] = [None] * len(asked)
    left = iter(range(len(asked)))

    async def client() -> None:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=600
        ) as api:
            for number in left:
                told[number] = await _ask(api, asked[number])

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return told


async def _ask(api: AsyncOpenAI, one: Asked) -> Told:
    begin_s = time.perf_counter()
    ttft_ms = 0.0
    num_pieces = 0
    asked = {"model": "demo", "prompt": one.prompt, "max_tokens": one.num_tokens, "stream": True}
    async with await api.completions.create(**asked, **OWN) as stream:
        async for chunk in stream:
            ttft_ms = ttft_ms or 1e3 * (time.perf_counter() - begin_s)
            num_pieces += 1
            if num_pieces == one.leaves:
                return Told(None, ttft_ms)
            if hasattr(chunk, "moectl"):
                return Told(chunk.moectl["token_ids"], ttft_ms)
    return Told(None, ttft_ms)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__,
        presets=("on-demand", "one after the other"),
        budget="25%",
        requests=200,
        clients=8,
        batch=(1, "requests that share a pass"),
        float32=(False, "serve a copy in float32"),
        rounds=(0, "measure speeds in so many rounds instead"),
        tokens=(32, "the longest answer"),
        leave=(0.15, "share of clients that hang up in the midst"),
        seed=0,
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
