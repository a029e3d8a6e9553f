"""A soak of the server: mixed requests, many of them hostile. Every answer is compared with a run
alone.

    python -m tools.bench.serving.serve_soak                    2,000 requests of 8 clients on the bundled model
    python -m tools.bench.serving.serve_soak --requests 1000 --clients 16
    python -m tools.bench.serving.serve_soak --batch 8          requests share passes, of a copy in float32

Prints how each kind of request went, how long /health took meanwhile, and the memory of the server
with its child processes. Exits 1 where an answer is wrong or missing.
"""

import argparse
import http.client
import json
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from moectl.bundled import demo_model
from moectl.show.render import Sheet, show_sheet
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.arguments import parser_of
from tools.bench.serving.serve import in_float32
from tools.bench.serving.servers import long_texts, serving

NUM_TOKENS = 8
NUM_PROMPTS = 40
HUGE = 2_000_000
PRESETS = ("on-demand", "horizon")
TEMPLATE = """{%- if messages[0].content == 'loop' -%}
{%- for _ in range(99999) -%}{%- for _ in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif messages[0].content == 'large' -%}{{ 'a' * 3000000000 }}{%- endif -%}
{%- for message in messages -%}{{ message.role }}: {{ message.content }}
{% endfor -%}assistant:"""
KINDS = {
    "answered": 30,
    "streamed": 20,
    "chat": 10,
    "response": 5,
    "response, streamed": 5,
    "message": 5,
    "message, streamed": 5,
    "tokens": 3,
    "long": 3,
    "half-closed": 5,
    "left in the midst": 10,
    "2 MB and hung up": 6,
    "2 MB": 5,
    "malformed": 5,
    "wrong host": 3,
    "template of 3 GB": 1,
    "template without end": 0.2,
    "preset": 1.5,
}


class Soak:
    """Requests to the server at `port` whose answers are known: token ids by prompt, as a text or
    as a chat, and the texts of the chats, `said`."""

    def __init__(
        self,
        port: int,
        texts: dict[str, list[int]],
        chats: dict[str, list[int]],
        long: str,
        said: dict[str, str],
    ) -> None:
        self.said = said
        self.port = port
        self.texts = texts
        self.chats = chats
        self.long = long

    def is_right(self, kind: str, seed: int) -> bool:
        """Send one request of a kind; whether its answer is the right one."""
        rng = random.Random(seed)
        prompt = rng.choice([text for text in self.texts if text != self.long])
        match kind:
            case "answered" | "chat" | "long":
                text = self.long if kind == "long" else prompt
                expected = (self.chats if kind == "chat" else self.texts)[text]
                return self._ids(self._post(_asked(text, is_chat=kind == "chat"))) == expected
            case "streamed":
                lines = self._post(_asked(prompt) | {"stream": True})[1].splitlines()
                return _took(json.loads(lines[-4].removeprefix(b"data: "))) == self.texts[prompt]
            case "response" | "message" | "response, streamed" | "message, streamed":
                return self._said(kind, prompt) == self.said[prompt]
            case "tokens":
                status, body = self._post({"prompt": prompt}, path="/tokenize")
                back = self._post({"tokens": json.loads(body)["tokens"]}, path="/detokenize")
                return status == 200 and json.loads(back[1])["prompt"] == prompt
            case "half-closed":
                answer = self._raw(_asked(prompt), wait_s=None).rpartition(b"\r\n\r\n")[2]
                return _took(json.loads(answer)) == self.texts[prompt]
            case "left in the midst":
                return self._leave(_asked(prompt) | {"stream": True}, num_lines=rng.randrange(8))
            case "2 MB and hung up":
                return self._raw(_asked("An old dog. " * (HUGE // 12)), wait_s=rng.random()) == b""
            case "2 MB":
                status, body = self._post(
                    _asked("An old dog. " * (HUGE // 12), is_chat=rng.random() < 0.5)
                )
                return status == 400 and b"context_length_exceeded" in body
            case "malformed":
                return (
                    self._post(
                        rng.choice(({"prompt": 3}, {"model": "demo", "promt": "x"}, [], "x"))
                    )[0]
                    == 400
                )
            case "wrong host":
                return self._post(_asked(prompt), Host="elsewhere.example")[0] == 403
            case "template of 3 GB" | "template without end":
                status, body = self._post(
                    _asked("large" if "3 GB" in kind else "loop", is_chat=True)
                )
                return status == 400 and b"chat template takes more than" in body
            case "preset":
                return self._post({"preset": rng.choice(PRESETS)}, path="/preset")[0] == 200
        raise AssertionError(kind)

    @contextmanager
    def _sent(self, asked: object, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request(
            "POST", path, json.dumps(asked), {"Content-Type": "application/json"} | headers
        )
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def _post(self, asked: object, path: str | None = None, **headers: str) -> tuple[int, bytes]:
        with self._sent(asked, path or _path(asked), **headers) as answer:
            return answer.status, answer.read()

    def _leave(self, asked: dict, num_lines: int) -> bool:
        with self._sent(asked, _path(asked)) as answer:
            return all(answer.readline() for _ in range(num_lines)) and answer.status == 200

    def _raw(self, asked: dict, wait_s: float | None) -> bytes:
        """Send a request, close this side and read the answer; with `wait_s` hang up after that
        many seconds instead."""
        body = json.dumps(asked).encode()
        head = (
            f"POST {_path(asked)} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=300) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if wait_s is not None:
                time.sleep(wait_s)
                return b""
            client.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    def _said(self, kind: str, prompt: str) -> str:
        """Return the text of an answer of OpenAI's responses or of Anthropic's messages."""
        is_message = kind.startswith("message")
        own = {"messages": [{"role": "user", "content": prompt}]}
        asked = (own | {"max_tokens": NUM_TOKENS}) if is_message else _as_response(prompt)
        asked |= {"temperature": 0, "ignore_eos": True, "stream": kind.endswith("streamed")}
        path = "/v1/messages" if is_message else "/v1/responses"
        status, body = self._post(asked, path=path)
        assert status == 200, body[:200]
        if not asked["stream"]:
            answer = json.loads(body)
            parts = answer["content"] if is_message else answer["output"][-1]["content"]
            return parts[-1]["text"]
        lines = [line for line in body.splitlines() if line.startswith(b"data: ")]
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert events[-1]["type"] in ("message_stop", "response.incomplete"), events[-1]
        deltas = [event["delta"] for event in events if event["type"].endswith("_delta")]
        texts = [delta["text"] for delta in deltas if "text" in delta]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        return "".join(texts if is_message else [event["delta"] for event in deltas])

    def _ids(self, answer: tuple[int, bytes]) -> list[int]:
        return _took(json.loads(answer[1]))


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo"
        model = in_float32(path) if options.batch > 1 else Path(shutil.copytree(demo_model(), path))
        (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        texts, chats, long, said = _alone(model)
        own = {"preset": PRESETS[0], "batch": options.batch, "experts": "exact"}
        with serving(model, **own) as (process, port):
            soak = Soak(port, texts, chats, long, said)
            going, memory, waits = _run(soak, process.pid, options)
            over = json.loads(_get(port, "/live"))
    rows = [(kind, going[kind, True], going[kind, False]) for kind in KINDS]
    num_wrong = sum(row[2] for row in rows)
    note = (
        f"{options.requests} requests of {options.clients} clients, --batch {options.batch}, seed "
        f"{options.seed}"
    )
    show_sheet(Sheet("Soak", ("kind", "right", "wrong or lost"), rows, note))
    show_sheet(Sheet("Memory", ("after requests", "MiB"), memory))
    waits.sort()
    print(
        f"/health: median {1e3 * waits[len(waits) // 2]:.0f} ms, at most {1e3 * waits[-1]:.0f} ms "
        f"of {len(waits)}"
    )
    print(f"requests: {over['requests']}; running {over['running']}, waiting {over['waiting']}")
    return int(num_wrong + over["running"] + over["waiting"] > 0)


def _alone(model: Path) -> tuple[dict[str, list[int]], dict[str, list[int]], str, dict[str, str]]:
    """The answers of a run without a server, to texts and to chats, the long text among them, and
    the texts of the chats."""
    found = long_texts()
    prompts = [text[:80].strip() for text in found[:NUM_PROMPTS]]
    with Session.open(str(model), Settings(preset="on-demand", budget="25%", threads=1)) as session:
        sampling = Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True)

        def answer(prompt: str | list[dict[str, str]]) -> list[int]:
            return [token.token_id for token in session.tokens(session.encode(prompt), sampling)]

        long = session.opened.tokenizer.decode(session.encode(" ".join(found)[:6000])[0, :900])
        texts = {prompt: answer(prompt) for prompt in (*prompts, long)}
        chats = {prompt: answer([{"role": "user", "content": prompt}]) for prompt in prompts}
        decode = session.opened.tokenizer.decode
        said = {prompt: decode(ids, skip_special_tokens=True) for prompt, ids in chats.items()}
        return texts, chats, long, said


def _run(
    soak: Soak, pid: int, options: argparse.Namespace
) -> tuple[Counter, list[tuple[int, str]], list[float]]:
    """Send all requests. Returns how many of each kind were right, the memory, and the seconds that
    /health took."""
    kinds = random.Random(options.seed).choices(
        list(KINDS), list(KINDS.values()), k=options.requests
    )
    memory = [(0, _mib(pid))]
    waits = []
    done = count(1)
    is_over = threading.Event()

    def ask(number: int) -> tuple[str, bool]:
        try:
            right = soak.is_right(kinds[number], number)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            print(f"{number}, {kinds[number]}: {error!r}", file=sys.stderr)
            right = False
        if (finished := next(done)) % (options.requests // 4) == 0:
            memory.append((finished, _mib(pid)))
        return kinds[number], right

    watching = threading.Thread(target=_watch, args=(soak.port, waits, is_over.wait))
    watching.start()
    try:
        with ThreadPoolExecutor(options.clients) as clients:
            going = Counter(clients.map(ask, range(options.requests)))
    finally:
        is_over.set()
        watching.join()
    time.sleep(2)  # the server hears of the last clients that have left
    return going, memory, waits


def _watch(port: int, waits: list[float], wait: Callable[[float], bool]) -> None:
    while not wait(0.2):
        begin_s = time.perf_counter()
        _get(port, "/health")
        waits.append(time.perf_counter() - begin_s)


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", path)
    with connection.getresponse() as answer:
        return answer.read()


def _mib(pid: int) -> str:
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    kib = 0
    for each in (pid, *children):
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{each}/status").read_text())
        kib += int(found[1]) if found else 0
    return f"{kib / 1024:.0f}"


def _asked(prompt: str, *, is_chat: bool = False) -> dict[str, object]:
    said = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    return {
        "model": "demo",
        **said,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "counters": True,
    }


def _as_response(prompt: str) -> dict[str, object]:
    return {"input": prompt, "max_output_tokens": NUM_TOKENS}


def _path(asked: object) -> str:
    return (
        "/v1/chat/completions"
        if isinstance(asked, dict) and "messages" in asked
        else "/v1/completions"
    )


def _took(answer: dict) -> list[int]:
    return answer["moectl"]["token_ids"]


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__, requests=2000, clients=8, batch=(1, "requests that share a pass"), seed=0
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
