"""Clients that shut down their side of a connection after the request, and wait for the answer."""

import json
import socket

import pytest
from openai import OpenAI

from tests.helpers.serving import EXACT, Running

ASKED = {"model": "tiny", "prompt": "sheep", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
INTERIM = "HTTP/1.1 100 Continue\r\n\r\n"


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


def heard(server: Running, sent: bytes) -> str:
    """What a client receives that sends nothing more."""
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30
    ) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        parts = list(iter(lambda: client.recv(1 << 16), b""))
    return b"".join(parts).decode()


@pytest.fixture
def text(client: OpenAI) -> str:
    return client.completions.create(prompt="sheep", max_tokens=40, **EXACT).choices[0].text


def test_a_half_closed_client_gets_its_answers(server: Running, text: str) -> None:
    """Also to two requests at once; what it gets before them is for it to ignore."""
    answers = heard(
        server, request(ASKED) + request(ASKED | {"max_tokens": 200, "prompt": "x" * 10_000})
    )
    assert answers.startswith(INTERIM)
    first, _, second = answers.replace(INTERIM, "").partition("HTTP/1.1 400")
    assert json.loads(first.splitlines()[-1])["choices"][0]["text"] == text
    assert json.loads(second.splitlines()[-1])["error"]["code"] == "context_length_exceeded"


def test_a_half_closed_client_gets_its_stream(server: Running, text: str) -> None:
    lines = heard(server, request(ASKED | {"stream": True})).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def test_an_old_client_that_closes_has_left(server: Running) -> None:
    """HTTP/1.0 has no interim response that would tell whether the client waits."""
    assert heard(server, request(ASKED | {"max_tokens": 200}, "1.0")) == ""
