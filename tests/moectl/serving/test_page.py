"""The page of a server in a browser, and the page of the documents."""

import asyncio
import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI

from moectl.bundled import demo_model
from moectl.commands.start.serve.server import Server
from moectl.serving.guard import LOOPBACK, ServerLimits
from moectl.serving.metrics import live
from runtime.model.open import open_model
from tests import ROOT
from tests.helpers.browser import LOOKS, Tab, browsing, needs_browser
from tests.helpers.serving import EXACT, SETTINGS, Running, idle, serving

pytestmark = pytest.mark.slow

PROMPTS = (
    "It was a dark and stormy night;",
    "sheep",
    "An old dog by the gate and",
    "Return the number of",
    "x = 1",
)


@needs_browser
def test_the_page_in_a_browser(server: Running, client: OpenAI, tmp_path: Path) -> None:
    """By keyboard alone: API key, switch of the preset, settings; at two widths, without requests
    to other hosts."""
    asyncio.run(_look(server, client, tmp_path))


async def _look(server: Running, client: OpenAI, tmp_path: Path) -> None:
    async with browsing(tmp_path) as tab:
        await tab.open(f"{server.url}/", width=1200, height=900)
        await tab.until("document.getElementById('said').textContent.includes('wants an API key')")
        await _unlock(tab)
        said = [message for message in tab.said if "401" not in message]
        assert await tab.value("document.getElementById('users').hidden")
        await asyncio.to_thread(
            client.completions.create, prompt="sheep", max_tokens=9, user="<b>Ann", **EXACT
        )
        total = server.scheduler.tally.read()["generated_tokens"]
        await tab.until(f"document.getElementById('speed-more').textContent === '{total:,} so far'")
        await tab.until("document.getElementById('hits').textContent.endsWith('%')")
        assert await tab.value("document.querySelectorAll('#misses-chart .layer').length") == 2
        users = await tab.value(
            "[...document.querySelectorAll('#owners tr')].map(row => row.textContent)"
        )
        assert any(text.startswith("<b>Ann19") for text in users)
        assert (
            await tab.value("document.getElementById('requests').textContent")
            == "running 0, waiting 0"
        )
        held = await tab.value("document.getElementById('residency').getAttribute('aria-label')")
        assert (
            sum(map(int, re.findall(r"(\d+) of 8 resident", held)))
            == server.scheduler.receipt["slots"]
            == 4
        )
        await tab.value("document.getElementById('preset').focus()")
        reached = []
        for _ in range(2):
            await tab.press("Tab")
            reached.append(await tab.value("document.activeElement.textContent"))
        assert reached == ["Switch", "Settings in force"]
        await tab.press("Enter")
        assert await tab.value("document.querySelector('details').open")
        await tab.value("document.getElementById('preset').value = 'near'")
        await tab.value("document.querySelector('#switch button').focus()")
        await tab.press("Enter")
        await tab.until("document.getElementById('said').textContent === 'near is in force.'")
        await tab.until("document.getElementById('about').textContent.includes(' near:')")
        assert server.scheduler.preset == "near"
        server.scheduler.switch("on-demand").settled.result()
        assert not said and {url.removeprefix(server.url) for url in tab.asked} == {
            "/",
            "/live",
            "/preset",
        }


@needs_browser
def test_a_chat_in_a_browser(tmp_path: Path) -> None:
    """Turns, stop, clear and an error, with the bundled model; what the last tokens used is lit; at
    two widths, light and dark."""
    opened = open_model(str(demo_model()))
    with serving(
        opened, SETTINGS, ServerLimits(max_tokens=120), tmp_path / "none.duckdb"
    ) as server:
        asyncio.run(_chat(server, tmp_path))


async def _chat(server: Running, pictures: Path) -> None:
    async with browsing(pictures) as tab:
        await tab.open(f"{server.url}/", width=1280, height=900)
        await tab.until("document.getElementById('said').textContent.includes('wants an API key')")
        await _unlock(tab)
        await tab.type("text", "<img src=x onerror=alert(1)> Return")
        await tab.press("Enter", shift=True)
        await tab.call("Input.insertText", text="the number of")
        await tab.press("Enter")
        await tab.until("turns.length === 1")
        await tab.until("document.querySelector('.turn:nth-child(2) div').textContent.length > 9")
        await tab.value("document.getElementById('stop').click()")
        await tab.until("turns.length === 2")
        await asyncio.to_thread(idle, server)
        assert server.scheduler.tally.read()["requests"]["left"] == 1
        said = "[...document.querySelectorAll('.turn')].map(turn => turn.lastChild.textContent)"
        assert await tab.value(said) == [
            "<img src=x onerror=alert(1)> Return\nthe number of",
            "stopped",
        ]
        await tab.type("text", "sheep")
        await tab.press("Enter")
        await tab.until("turns.length === 4")
        assert re.fullmatch(
            r"\d+ tokens, .* per second, hit rate .* %, stall \d+ ms.*", (await tab.value(said))[3]
        )
        lit = "document.getElementById('residency').getAttribute('aria-label')"
        for one in live(server.scheduler)["last_token"]:
            experts = " ".join(map(str, one["hit"] + one["missed"]))
            await tab.until(f"{lit}.includes('the last tokens used {experts}')")
        for width, scheme in LOOKS:
            await tab.look(width, scheme)
            await tab.picture(pictures / f"{width}-{scheme}.png")
        assert not await tab.value("document.images.length")
        await tab.value("key = 'wrong'")
        await tab.type("text", "again")
        await tab.press("Enter")
        await tab.until(
            "document.getElementById('chat-said').textContent === 'the API key is wrong'"
        )
        assert await tab.value("[turns.length, document.getElementById('text').value]") == [
            4,
            "again",
        ]
        await tab.value("document.getElementById('clear').click()")
        assert await tab.value(
            "[turns.length, document.getElementById('turns').children.length]"
        ) == [0, 0]


async def _unlock(tab: Tab) -> None:
    await tab.type("key", "secret")
    await tab.press("Enter")
    await tab.until(
        "document.getElementById('about').textContent.includes('experts in the fast tier')"
    )


@needs_browser
def test_the_page_says_that_the_model_loads(tmp_path: Path) -> None:
    """And that it could not be asked; what was written stays in the box."""
    server = Server("tiny", ServerLimits(), api_key=None, hosts=LOOPBACK)
    with socket.create_server(("127.0.0.1", 0)) as listening, server.answering(listening):
        asyncio.run(_early(f"http://127.0.0.1:{listening.getsockname()[1]}/", tmp_path))


async def _early(url: str, scratch: Path) -> None:
    async with browsing(scratch) as tab:
        await tab.open(url, width=400, height=900)
        await tab.until(
            "document.getElementById('said').textContent.startsWith('The model is loading (')"
        )
        await tab.type("text", "sheep")
        await tab.press("Enter")
        await tab.until(
            "document.getElementById('chat-said').textContent.startsWith('tiny is loading: try "
            "again')"
        )
        assert await tab.value("document.getElementById('text').value") == "sheep"


def test_the_page_of_the_documents_is_true(
    server: Running, client: OpenAI, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    for old, new in (
        (":8000", f":{server.url.rpartition(':')[2]}"),
        ('"demo"', '"tiny"'),
        ("any", "secret"),
    ):
        page = page.replace(old, new)
    [program], [commands] = (
        re.findall(rf"```{name}\n(.*?)```", page, re.DOTALL) for name in ("python", "bash")
    )
    answer = client.completions.create(
        prompt=PROMPTS[3], max_tokens=16, model="tiny", temperature=0
    )
    capfd.readouterr()
    exec(program, {})
    text, _, hits = capfd.readouterr().out.rpartition(answer.choices[0].text)
    assert text == "" and int(hits) > 0
    chat, metrics = (
        subprocess.run(line, shell=True, capture_output=True).stdout
        for line in commands.splitlines()
    )
    assert (
        json.loads(chat)["usage"]["completion_tokens"] <= 8
        and b"moectl_expert_hits_total" in metrics
    )
