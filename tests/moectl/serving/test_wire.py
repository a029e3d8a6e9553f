"""Bodies of requests as JSON, and JSON as it is sent."""

import asyncio
import json

import pytest
from starlette.requests import Request

from moectl.serving.wire import AsciiJson, Refusal, object_of, shown

JSON = "application/json"


def given(body: bytes, kind: str | None = JSON, *, parts: int = 1, **headers: str) -> dict:
    headers = {
        "content-type": kind,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    coded = [
        (name.encode(), value.encode("latin-1"))
        for name, value in headers.items()
        if value is not None
    ]
    size = -(-len(body) // parts)
    messages = [
        {
            "type": "http.request",
            "body": body[size * part : size * (part + 1)],
            "more_body": part + 1 < parts,
        }
        for part in range(parts)
    ]

    async def receive() -> dict:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    return asyncio.run(
        object_of(Request({"type": "http", "method": "POST", "headers": coded}, receive))
    )


def refused(*args: object, **own: object) -> str:
    with pytest.raises(Refusal) as refusal:
        given(*args, **own)
    assert refusal.value.status == 400
    json.dumps(refusal.value.body(), ensure_ascii=False).encode()  # it can be told in UTF-8
    return refusal.value.message


@pytest.mark.parametrize(
    "kind", [JSON, "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
def test_an_object_is_read_whatever_its_parts(kind: str) -> None:
    asked = {"prompt": "sh\u00e9ep \u2028 \U0001f600" * 9000, "n": 1}
    for body in (json.dumps(asked), json.dumps(asked, ensure_ascii=False)):
        assert given(body.encode(), kind) == given(body.encode(), kind, parts=7) == asked
    # as some editors begin a file
    assert given(b"\xef\xbb\xbf{}", kind, content_encoding="identity") == {}


@pytest.mark.parametrize(
    "kind", [None, "", "application/x-www-form-urlencoded", "text/plain", "multipart/form-data"]
)
def test_another_kind_of_body_is_told_what_to_send(kind: str | None) -> None:
    assert refused(b'{"model": "tiny"}', kind).endswith(": send Content-Type: application/json")
    assert (
        refused(b"", kind)
        == "the body is empty: send a JSON object with Content-Type: application/json"
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "the body is empty"),
        (b" ", "the body is not JSON: Expecting value at character 1"),
        (b"{'model': 1}", "the body is not JSON: Expecting property name"),
        (b'{"a": 1} {}', "the body is not JSON: Extra data at character 9"),
        (b"[]", "the body is an array: send a JSON object"),
        (b'"text"', "the body is a text: send"),
        (b"1", "the body is a number: send"),
        (b"1.5", "the body is a number: send"),
        (b"null", "the body is null: send"),
        (b"true", "the body is true or false: send"),
        (b'{"a": "\xff"}', "byte 7 of the body is not UTF-8: send JSON in UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "byte 0 of the body is not UTF-8"),
        (b"[" * 200_000, "the body is nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "or has a number of thousands of digits"),
        (b'{"a": "\\ud83d"}', "a: half a character"),
        (b'{"a": [{"b": "cut \\udc00"}]}', "a: half a character"),
        (b'{"a": [{"\\ud83d": 1}]}', "a: half a character"),
        (b'{"\\ud83d": 1}', "\\ud83d: half a character"),
    ],
)
def test_a_wrong_body_is_refused_in_one_line(body: bytes, told: str) -> None:
    message = refused(body)
    assert told in message and "\n" not in message


def test_a_body_in_parts_that_ends_early_or_is_compressed() -> None:
    assert "is compressed (Content-Encoding: gzip): send it as it is" in refused(
        b"\x1f\x8b", content_encoding="gzip"
    )
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict:
        return messages.pop(0)

    with pytest.raises(Refusal, match="ended early"):
        asyncio.run(object_of(Request({"type": "http", "method": "POST", "headers": []}, receive)))


def test_whole_characters_that_are_escaped_are_taken() -> None:
    assert given(b'{"a": "\\ud83d\\ude00 \\u00e9"}') == {"a": "\U0001f600 \u00e9"}


def test_what_is_sent_is_ascii() -> None:
    text = "a\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\ud83d\u00e9\U0001f600"
    body = AsciiJson({text: text}).body
    assert (
        body.isascii() and len(body.decode().splitlines()) == 1 and json.loads(body) == {text: text}
    )


def test_a_name_is_shown_in_one_line() -> None:
    text = "\u540d\u3000x\n\r\x1b[31m\u2028\x85\ud83d\udcff\x00"
    assert shown(text) == "\u540d\u3000x\\n\\r\\x1b[31m\\u2028\\x85\\ud83d\\udcff\\x00"
