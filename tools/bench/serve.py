"""Concurrent clients of a server: every token is compared with a run alone, and the cost of sharing is measured.

    python -m tools.bench.serve              200 requests of 8 clients on the bundled model, some of which leave
    python -m tools.bench.serve --presets near,horizon --requests 60 --leave 0.3
    python -m tools.bench.serve --batches --requests 48     what batches, padded or continuous, would make of it

The server is a process of its own, its clients are OpenAI's. Exits 1 where a token differs or an answer is lost.
"""

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import islice

import httpx2
import torch
from openai import AsyncOpenAI
from transformers import ContinuousBatchingConfig, GenerationConfig

from moectl.bundled import demo_model
from moectl.shared.defaults import DEFAULT_STORE
from moectl.shared.opening import existing
from moectl.show.render import Sheet, show_sheet
from profilers.text.corpus import documents
from runtime.control.counters import hit_rate
from runtime.session.generate import Sampling
from runtime.session.session import Session, Settings

OWN = {"temperature": 0, "extra_body": {"ignore_eos": True, "counters": True}}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; `leaves` is the number of pieces after which the client disconnects, if it does."""

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
    if options.batches:
        show_sheet(_batches(asked, options))
        return 0
    rows, is_sound = [], True
    for preset in options.presets.split(","):
        expected, alone_rate, alone_s = _alone(asked, preset, options)
        told, counted, seconds = _served(asked, preset, options)
        row, sound = _row(preset, asked, told, expected)
        tokens = counted["generated_tokens"]
        speeds = f"{sum(map(len, expected)) / alone_s:.1f}", f"{tokens / seconds:.1f}"
        rates = f"{alone_rate:.3f}", f"{hit_rate(counted['counters']):.3f}"
        rows.append((*row, *speeds, *rates, f"{_median([one.ttft_ms for one in told]):.0f}"))
        is_sound &= sound and counted["requests"]["failed"] == 0
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
        "ttft ms",
    )
    note = f"{options.requests} requests of {options.clients} clients, {options.rows} at a time, seed {options.seed}"
    show_sheet(Sheet("Served and alone", columns, rows, note))
    return 0 if is_sound else 1


def _row(preset: str, asked: list[Asked], told: list[Told], expected: list[list[int]]) -> tuple[tuple, bool]:
    kept = [(one.token_ids, ids) for one, ids in zip(told, expected, strict=True) if one.token_ids is not None]
    num_equal = sum(ours == alone for ours, alone in kept)
    gone = [one.leaves is not None for one, heard in zip(asked, told, strict=True) if heard.token_ids is None]
    num_left, num_lost = sum(gone), len(gone) - sum(gone)
    return (preset, len(kept), num_equal, num_left, num_lost), num_equal == len(kept) and num_lost == 0


def _requests(options: argparse.Namespace) -> list[Asked]:
    rng = random.Random(options.seed)
    texts = [text for found in islice(documents("builtin:held-out"), 200) if len(text := found.text) > 200]
    asked = []
    for _ in range(options.requests):
        text = rng.choice(texts)
        begin, length = rng.randrange(len(text) - 150), rng.randrange(20, 150)
        leaves = rng.randrange(1, 8) if rng.random() < options.leave else None
        asked.append(Asked(text[begin : begin + length].strip() or "x", rng.randrange(8, options.tokens + 1), leaves))
    return asked


def _alone(asked: list[Asked], preset: str, options: argparse.Namespace) -> tuple[list[list[int]], float, float]:
    """The answers of `moectl run`, one after the other."""
    settings = Settings(preset=preset, budget=options.budget, threads=1)
    with Session.open(str(demo_model()), settings, store=existing(DEFAULT_STORE)) as session:
        begin_s = time.perf_counter()
        ids = [
            [token.token_id for token in session.generate(session.encode(one.prompt), _sampling(one))] for one in asked
        ]
        return ids, hit_rate(session.controller.counters.totals()), time.perf_counter() - begin_s


def _sampling(one: Asked) -> Sampling:
    return Sampling(max_new_tokens=one.num_tokens, ignore_eos=True)


def _served(asked: list[Asked], preset: str, options: argparse.Namespace) -> tuple[list[Told], dict, float]:
    own = ("--preset", preset, "--budget", options.budget, "--rows", str(options.rows), "--threads", "1", "--port", "0")
    command = [sys.executable, "-m", "moectl", "serve", *own]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        loading, ready = process.stderr.readline(), process.stderr.readline()
        assert ready, loading
        url = re.search(r"http://[0-9.:]+", ready)[0]
        begin_s = time.perf_counter()
        told = asyncio.run(_clients(asked, url, options.clients))
        seconds = time.perf_counter() - begin_s
        counted = httpx2.get(f"{url}/live").json()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, f"the server ended with {process.returncode}"
    return told, counted, seconds


async def _clients(asked: list[Asked], url: str, num_clients: int) -> list[Told]:
    """Run clients that each send the next request as soon as they have an answer."""
    told: list[Told | None] = [None] * len(asked)
    left = iter(range(len(asked)))

    async def client() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=600) as api:
            for number in left:
                told[number] = await _ask(api, asked[number])

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return told


async def _ask(api: AsyncOpenAI, one: Asked) -> Told:
    begin_s, ttft_ms, num_pieces = time.perf_counter(), 0.0, 0
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


# For comparison: several requests in a pass, which moectl does not do


def _batches(asked: list[Asked], options: argparse.Namespace) -> Sheet:
    """The same prompts in batches, by transformers over the same session; seconds are CPU time of the thread."""
    rows = []
    settings = Settings(preset=options.presets, budget=options.budget, threads=1)
    with Session.open(str(demo_model()), settings, store=existing(DEFAULT_STORE)) as session:
        prompts = [session.encode(one.prompt)[0].tolist() for one in asked]
        ways = {"one by one": _one_by_one, f"padded, {options.rows}": _padded, "continuous": _continuous}
        expected = None
        for name, way in ways.items():
            first_pass, begin_s = len(session.controller.counters.passes), time.process_time()
            found = [_to_end(ids, session) for ids in way(session, prompts, options)]
            seconds = time.process_time() - begin_s
            expected = expected or found
            num_other = sum(ids != alone for ids, alone in zip(found, expected, strict=True))
            rate = hit_rate(session.controller.counters.totals(first_pass=first_pass))
            rows.append((name, num_other, f"{sum(map(len, found)) / seconds:.0f}", f"{rate:.3f}"))
    note = f"{len(asked)} prompts, {options.tokens} tokens each, preset {options.presets} at {options.budget}"
    return Sheet("Batches", ("way", "answers that differ", "tokens per CPU second", "hit rate"), rows, note)


def _one_by_one(session: Session, prompts: list[list[int]], options: argparse.Namespace) -> list[list[int]]:
    sampling = Sampling(max_new_tokens=options.tokens)
    return [[token.token_id for token in session.generate(torch.tensor([ids]), sampling)] for ids in prompts]


def _padded(session: Session, prompts: list[list[int]], options: argparse.Namespace) -> list[list[int]]:
    found, padding = [], session.opened.config.pad_token_id
    for batch in (prompts[first : first + options.rows] for first in range(0, len(prompts), options.rows)):
        longest = max(map(len, batch))
        ids = torch.tensor([[padding] * (longest - len(one)) + one for one in batch])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in batch])
        session.new_requests(len(batch))
        drawn = Sampling(max_new_tokens=options.tokens).options()
        found += session.opened.model.generate(ids, attention_mask=mask, **drawn)[:, longest:].tolist()
    return found


def _continuous(session: Session, prompts: list[list[int]], options: argparse.Namespace) -> list[list[int]]:
    config = session.opened.config
    wanted = GenerationConfig(
        max_new_tokens=options.tokens,
        do_sample=False,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    room = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=256)
    found = session.opened.model.generate_batch(prompts, generation_config=wanted, continuous_batching_config=room)
    return [one.generated_tokens for _, one in sorted(found.items(), key=lambda item: int(item[0].split("_")[-1]))]


def _to_end(ids: list[int], session: Session) -> list[int]:
    end = session.opened.config.eos_token_id
    return ids[: ids.index(end) + 1] if end in ids else ids


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="on-demand", help="one after the other")
    parser.add_argument("--budget", default="25%")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="answered at a time")
    parser.add_argument("--tokens", type=int, default=32, help="the longest answer")
    parser.add_argument("--leave", type=float, default=0.15, help="share of clients that hang up in the midst")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", action="store_true", help="compare ways of batching instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
