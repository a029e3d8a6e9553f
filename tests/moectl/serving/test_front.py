"""What a server answers before there is a model."""

import asyncio
import re
from importlib.resources import files

import httpx2
import pytest

from moectl.serving.front import Front


async def answers(front: Front) -> dict[str, tuple[int, str]]:
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=front), base_url="http://localhost"
    ) as client:
        asked = [
            ("GET", "/"),
            ("GET", "/health"),
            ("POST", "/health"),
            ("GET", "/live"),
            ("POST", "/v1/completions"),
        ]
        got = [await client.request(method, path) for method, path in asked]
        policy = got[0].headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "frame-ancestors 'none'"} <= set(policy)
        assert got[0].headers["x-frame-options"] == "DENY"
        assert [one.headers.get("content-type", "")[:9] for one in got].count(
            "text/html"
        ) == 1  # the page alone
        return {
            f"{method} {path}": (one.status_code, one.text)
            for (method, path), one in zip(asked, got, strict=True)
        }


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_page_and_health_from_the_first_moment(is_alive: bool) -> None:
    async def app(scope: dict, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"ours"})

    front = Front("tiny")
    page, *rest = asyncio.run(answers(front)).values()
    assert page[0] == 200 and "<title>moectl serve</title>" in page[1]
    assert rest[0] == (503, '{"status":"loading"}')
    assert all(status == 503 and '"code":"loading"' in text for status, text in rest[1:])
    front.begin(app, lambda: is_alive)
    after = asyncio.run(answers(front))
    health = (200, '{"status":"ok"}') if is_alive else (503, '{"status":"stopping"}')
    assert list(after.values()) == [page, health, *3 * [(299, "ours")]]


def test_the_page_is_small_and_asks_once() -> None:
    """All of it is sent in less than 60 kB, compressed, and a browser that has a file gets none; there is
    nothing else, and nothing of another host."""
    sent = asyncio.run(_sent())
    assert sum(sent.values()) < 60_000
    folder = files("moectl.serving").joinpath("page")
    names = {f"/page/{one.name}" for one in folder.iterdir() if one.name[-3:] in (".js", "css")}
    assert sent.keys() == {"/", *names, "/page/vendor/marked.umd.js", "/page/vendor/purify.min.js"}


async def _sent() -> dict[str, int]:
    """Return the bytes sent of each file that the page asks for."""
    sent = {}
    transport = httpx2.ASGITransport(app=Front("tiny"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        page = await client.get("/")
        links = [f"/{link}" for link in re.findall(r'(?:src|href)="(page/[^"]*)"', page.text)]
        for path in ("/", *links):
            async with client.stream("GET", path) as got:
                sent[path] = len(b"".join([part async for part in got.aiter_raw()]))
            known = {"If-None-Match": got.headers["etag"]}
            again = await client.get(path, headers=known)
            assert (got.status_code, again.status_code, again.content) == (200, 304, b"")
        for path in ("/page/nothing.js", "/page/%2e%2e/front.py", "/page/"):
            got = await client.get(path)
            assert got.status_code == 404 or got.content == page.content, path
    return sent
