"""Host, origin, key and size of a request, checked before the application sees it."""

import asyncio
import json

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from artifacts.errors import BadUsage
from moectl.serving.guard import LOOPBACK, OWN_KEY, Guard, ServerLimits, guarded, host_name

Header = tuple[str, str]


def answer(
    *headers: Header,
    hosts: tuple[str, ...] = LOOPBACK,
    key: str | None = None,
    path: str = "/live",
    kind: str = "http",
    pieces: tuple[bytes, ...] = (),
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer; the application answers 200 with the body that it
    received."""
    sent: list[dict] = []

    async def app(scope: dict, receive: object, send: object) -> None:
        body = b"".join([(await receive())["body"] for _ in pieces])
        await send({"status": 200, "headers": [], "body": body})

    messages = iter([{"type": "http.request", "body": piece} for piece in pieces])

    async def receive() -> dict:
        return next(messages)

    async def send(message: dict) -> None:
        sent.append(message)

    coded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    guard = Guard(app, api_key=key, hosts=hosts, body_nbytes=10)
    asyncio.run(guard({"type": kind, "path": path, "headers": coded}, receive, send))
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], sent[-1]["body"], told


OURS = [
    "localhost",
    "LOCALHOST:8000",
    "Localhost.",
    "localhost.:8000",
    "localhost:",
    "127.0.0.1:1",
    "127.0.0.1.",
]
OURS += ["[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000", "[::0001]"]
OTHERS = [
    "",
    ":8000",
    "elsewhere.example",
    "elsewhere.example:8000",
    "localhost.elsewhere.example",
    "localhost..",
    ".",
]
OTHERS += [
    "elsewhere.example#localhost",
    "localhost@elsewhere.example",
    "localhost:8000@elsewhere.example",
    "localhost:a",
]
OTHERS += [
    "127.0.0.1.elsewhere.example",
    "127.0.0.10",
    "::1",
    "[::2]",
    "[::1",
    "[::1]x",
    "[::]",
    "[]",
    "[1]",
    "localhost/",
]
OTHERS += [
    "localhost, elsewhere.example",
    "l\u00f6calhost",
    "localhost:\u00b2",
    "localhost\n",
    "\u017flocalhost",
    "0.0.0.0",
]


@pytest.mark.parametrize("host", OURS)
def test_names_of_this_machine(host: str) -> None:
    assert (
        answer(("Host", host))[0] == answer(("Host", host), ("Origin", f"http://{host}"))[0] == 200
    )


@pytest.mark.parametrize("host", OTHERS)
def test_names_that_a_page_elsewhere_may_choose(host: str) -> None:
    assert host_name(host) not in LOOPBACK
    sendable = host.encode("latin-1", "replace").decode("latin-1")
    assert (
        answer(("Host", sendable))[0]
        == answer(("Host", "localhost"), ("Origin", f"http://{sendable}"))[0]
        == 403
    )
    assert answer(("Host", sendable), ("Origin", f"http://{sendable}"), hosts=())[0] == 200


def test_one_host_and_no_origin_without_a_host() -> None:
    ours = ("Host", "localhost")
    other = ("Host", "elsewhere.example")
    for headers, status in (
        ([], 400),
        ([ours, ours], 400),
        ([ours, other], 400),
        ([other, ours], 400),
        ([ours, ("Origin", "null")], 403),
        ([ours, ("Origin", "http://localhost"), ("Origin", "http://elsewhere.example")], 403),
        ([ours, ("Origin", "localhost")], 403),
        ([ours, ("Origin", "chrome-extension://elsewhere")], 403),
        ([ours, ("Origin", "https://[::1]:3000")], 200),
    ):
        assert answer(*headers)[0] == status
        assert answer(*headers, hosts=())[0] == 200
    assert b"one Host header, not 0: ask for localhost" in answer()[1]
    assert b"not called 'elsewhere.example': ask for localhost" in answer(other)[1]
    assert b"pages of 'null' may not ask" in answer(ours, ("Origin", "null"))[1]


def test_a_key_opens_all_but_the_page_and_health() -> None:
    host = ("Host", "localhost")
    for given, status in (
        ([], 401),
        ([("Authorization", "Bearer guess")], 401),
        ([("Authorization", "secret")], 401),
        ([("Authorization", "Basic secret")], 401),
        ([("Authorization", "Token secret")], 401),
        ([("Authorization", "Bearer secret")], 200),
        ([("Authorization", "BEARER secret")], 200),
        ([(OWN_KEY, "secret")], 200),
        ([(OWN_KEY, "guess"), ("Authorization", "Bearer secret")], 401),
    ):
        assert answer(host, *given, key="secret")[0] == status
        assert answer(host, *given, key="secret", path="/")[0] == 200
        assert (
            answer(host, *given, key="secret", path="/health")[0] == answer(host, *given)[0] == 200
        )
    for given, told in (
        ([], b"wants an API key"),
        ([("Authorization", "Bearer guess")], b"the API key is wrong"),
    ):
        _, body, headers = answer(host, *given, key="secret")
        assert told in body and json.loads(body)["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer" and headers["connection"] == "close"
    assert (
        answer(host, ("Authorization", "Bearer schl\u00c3\u00bcssel"), key="schl\u00fcssel")[0]
        == 200
    )
    # as an environment in Latin-1 has it
    assert answer(host, ("Authorization", "Bearer \xff"), key="\udcff")[0] == 200


def test_pages_that_may_ask() -> None:
    """A browser asks first, without a key; a page that may ask still needs it, and a host of
    ours."""

    async def app(scope: dict, receive: object, send: object) -> None:
        await PlainTextResponse("ours")(scope, receive, send)

    page = "http://localhost.example:3000"
    head = {"Origin": page, "Host": "localhost"}
    first = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": OWN_KEY}
    key = {OWN_KEY: "secret"}
    for origins, headers, wanted in (
        ((page,), head | key, (200, page)),
        (("*",), head | key, (200, "*")),
        ((page,), head, (401, page)),
        (("http://other",), head | key, (403, None)),
        ((), head | key, (403, None)),
        ((page,), head | key | {"Host": "elsewhere.example"}, (403, page)),
    ):
        asked = guarded(app, api_key="secret", hosts=LOOPBACK, body_nbytes=10, origins=origins)
        client = TestClient(asked)
        told = client.get("/v1/models", headers=headers)
        assert (told.status_code, told.headers.get("access-control-allow-origin")) == wanted
        allowed = client.options("/v1/models", headers=head | first)
        assert allowed.is_success == bool({page, "*"} & set(origins))
        assert ("access-control-allow-origin" in allowed.headers) == allowed.is_success


def test_a_body_has_at_most_its_bytes() -> None:
    host = ("Host", "localhost")
    assert answer(host, ("Content-Length", "10"), pieces=(b"12345", b"67890"))[:2] == (
        200,
        b"1234567890",
    )
    status, body, headers = answer(host, ("Content-Length", "11"))
    assert (status, headers["content-type"]) == (
        413,
        "application/json",
    ) and b"larger than 10 bytes" in body
    with pytest.raises(
        Exception, match="larger than 10 bytes"
    ) as error:  # the application makes an answer of it
        answer(host, pieces=(b"12345", b"678901"))
    assert error.value.status_code == 413


def test_what_is_no_request_is_passed_on() -> None:
    assert answer(kind="lifespan", key="secret")[0] == 200


def test_a_server_has_room() -> None:
    ServerLimits(num_rows=1, num_waiting=0, max_tokens=1)
    for limits in ({"num_rows": 0}, {"num_waiting": -1}, {"max_tokens": 0}):
        with pytest.raises(BadUsage, match="room for a request, and answers of at least one token"):
            ServerLimits(**limits)
    limits = ServerLimits()
    assert (limits.num_rows, limits.num_waiting, limits.max_tokens) == (8, 64, None)
    assert (limits.body_nbytes, limits.closing_s) == (4 * 2**20, 30)
    assert (limits.head_s, limits.body_s, limits.kept_nbytes) == (10, 60, None)
