"""Requests that arrive by halves are ended in time, and what they held comes back; clients that shut
down their side of a connection after the request get their answer."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from openai import OpenAI
from starlette.requests import Request

from moectl.commands.start.serve.server import Server
from moectl.serving.guard import LOOPBACK, ServerLimits
from moectl.serving.wire import AsciiJson, Refusal, object_of
from tests.helpers.serving import EXACT, Running

HEAD_S = 0.3
BODY_S = 0.6
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
ASKED = {"model": "tiny", "prompt": "sheep", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
INTERIM = "HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that is still loading: what it does with connections needs no model."""
    limits = ServerLimits(head_s=HEAD_S, body_s=BODY_S)
    server = Server("tiny", limits, api_key=None, hosts=LOOPBACK)
    server.front.begin(reader, lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as listening, server.answering(listening):
        yield listening.getsockname()[1]


async def reader(scope: dict, receive: object, send: object) -> None:
    """An application that reads the body, as ours does."""
    try:
        found = await object_of(Request(scope, receive))
        await asyncio.sleep(found.get("wait_s", 0))
        answer = AsciiJson(list(found))
    except Refusal as refusal:
        answer = AsciiJson(refusal.body(), refusal.status)
    await answer(scope, receive, send)


def heard(client: socket.socket) -> str:
    """Return all bytes until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()


@pytest.mark.parametrize(
    ("parts", "told", "limit_s"),
    [
        ([b""], None, HEAD_S),
        ([b"P"], "head", HEAD_S),
        ([HEAD], "head", HEAD_S),
        ([HEAD, *[b"X: a\r\n"] * 20], "head", HEAD_S),  # a line from time to time does not help
        ([HEAD + b"Content-Length: 9\r\n\r\n"], "body", BODY_S),
        ([HEAD + b"Content-Length: 90\r\n\r\n", *[b" "] * 20], "body", BODY_S),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b'5\r\n{"a"'], "body", BODY_S),
    ],
    ids=["nothing", "a letter", "half a head", "a slow head", "no body", "a slow body", "chunks"],
)
def test_half_a_request_is_ended_in_time(
    port: int, parts: list[bytes], told: str | None, limit_s: float
) -> None:
    begin_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        for part in parts:
            try:
                client.sendall(part)
            except OSError:  # it has been closed
                break
            time.sleep(0.05 if len(parts) > 3 else 0)
        try:
            answer = heard(client)
        except ConnectionResetError:
            answer = None
    assert limit_s <= time.monotonic() - begin_s + 0.05
    if answer is None:
        assert len(parts) > 3
    elif told is None:
        assert answer == ""
    else:
        assert answer.startswith("HTTP/1.1 408") and "connection: close" in answer.lower()
        message = json.loads(answer.splitlines()[-1])["error"]["message"]
        assert (
            message
            == f"the {told} of the request did not arrive within {limit_s:g} s: send it again"
        )


def test_a_request_that_is_whole_is_not_timed(port: int) -> None:
    """However long its answer takes; nor one that was sent with it, and waits for that."""
    body = json.dumps({"wait_s": BODY_S + 0.1}).encode()
    whole = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(whole + whole.replace(b"Host", b"Connection: close\r\nHost"))
        assert heard(client).count('["wait_s"]') == 2


def test_the_others_are_answered_meanwhile(port: int) -> None:
    with ExitStack() as opened:
        halves = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)
        ]
        for half in halves:
            half.sendall(HEAD)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(HEALTH)
            assert '"ok"' in heard(client)
        assert {heard(half)[:12] for half in halves} == {"HTTP/1.1 408"}


def test_the_memory_of_unfinished_bodies_comes_back(port: int) -> None:
    def held_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = held_nbytes()
    most = 4 << 20
    with ExitStack() as opened:
        halves = []
        for _ in range(15):
            halves.append(opened.enter_context(socket.create_connection(("127.0.0.1", port))))
            with suppress(OSError):  # a busy machine may need all the time
                halves[-1].sendall(
                    HEAD + f"Content-Length: {most}\r\n\r\n".encode() + b" " * (most - 100)
                )
        for half in halves:
            with suppress(OSError):
                heard(half)
    assert held_nbytes() - before < len(halves) * most / 3


def request(asked: dict, version: str = "1.1") -> bytes:
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer "
        "secret\r\n"
    )
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def half_closed(server: Running, sent: bytes) -> str:
    """What a client receives that sends nothing more."""
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
    ) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return heard(client)


@pytest.fixture
def text(client: OpenAI) -> str:
    return client.completions.create(prompt="sheep", max_tokens=40, **EXACT).choices[0].text


def test_a_half_closed_client_gets_its_answers(server: Running, text: str) -> None:
    """Also to two requests at once; what it gets before them is for it to ignore."""
    answers = half_closed(
        server, request(ASKED) + request(ASKED | {"max_tokens": 200, "prompt": "x" * 10_000})
    )
    assert answers.startswith(INTERIM)
    first, _, second = answers.replace(INTERIM, "").partition("HTTP/1.1 400")
    assert json.loads(first.splitlines()[-1])["choices"][0]["text"] == text
    assert json.loads(second.splitlines()[-1])["error"]["code"] == "context_length_exceeded"


def test_a_half_closed_client_gets_its_stream(server: Running, text: str) -> None:
    lines = half_closed(server, request(ASKED | {"stream": True})).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def test_an_old_client_that_closes_has_left(server: Running) -> None:
    """HTTP/1.0 has no interim response that would tell whether the client waits."""
    assert half_closed(server, request(ASKED | {"max_tokens": 200}, "1.0")) == ""
