"""The page of a server in a browser, and the page of the documents."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI

from tests import ROOT
from tests.helpers.browser import BROWSER, browsing
from tests.helpers.serving import EXACT, Running

PROMPTS = ("It was a dark and stormy night;", "sheep", "An old dog by the gate and", "Return the number of", "x = 1")


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
def test_the_page_in_a_browser(server: Running, client: OpenAI, tmp_path: Path) -> None:
    """By keyboard alone: API key, switch of the preset, receipt; at two widths, without requests to other hosts."""
    asyncio.run(_look(server, client, tmp_path))


async def _look(server: Running, client: OpenAI, tmp_path: Path) -> None:
    async with browsing(tmp_path) as tab:
        await tab.open(f"{server.url}/", width=1200, height=900)
        await tab.until("document.getElementById('said').textContent.includes('wants an API key')")
        await tab.value("document.getElementById('key').focus()")
        await tab.call("Input.insertText", text="secret")
        await tab.press("Enter")
        await tab.until("document.getElementById('model').textContent === 'tiny'")
        said = [message for message in tab.said if "401" not in message]
        await asyncio.to_thread(client.completions.create, prompt="sheep", max_tokens=9, **EXACT)
        total = server.scheduler.tally.read()["generated_tokens"]
        await tab.until(f"document.getElementById('speed-more').textContent === '{total:,} so far'")
        await tab.until("document.getElementById('hits').textContent.endsWith('%')")
        assert await tab.value("document.querySelectorAll('#misses-chart rect').length") == 2
        held = await tab.value("document.getElementById('residency').getAttribute('aria-label')")
        assert sum(map(int, re.findall(r"(\d+) of 8 resident", held))) == server.scheduler.receipt["slots"] == 4
        for width in (1200, 360):
            await tab.size(width, 900)
            assert await tab.value("document.documentElement.scrollWidth") <= width
            await tab.picture(tmp_path / f"{width}.png")
        await tab.value("document.getElementById('preset').focus()")
        reached = []
        for _ in range(2):
            await tab.press("Tab")
            reached.append(await tab.value("document.activeElement.textContent"))
        assert reached == ["Switch", "What is in force"]
        await tab.press("Enter")
        assert await tab.value("document.querySelector('details').open")
        await tab.value("document.getElementById('preset').value = 'near'")
        await tab.value("document.querySelector('#switch button').focus()")
        await tab.press("Enter")
        await tab.until("document.getElementById('said').textContent === 'near is in force.'")
        await tab.until("document.getElementById('about').textContent.includes(' near,')")
        assert server.scheduler.preset == "near"
        server.scheduler.switch("on-demand").settled.result()
        assert not said and {url.removeprefix(server.url) for url in tab.asked} == {"/", "/live", "/preset"}


def test_the_page_of_the_documents_is_true(server: Running, client: OpenAI, capfd: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    for old, new in ((":8000", f":{server.url.rpartition(':')[2]}"), ('"demo"', '"tiny"'), ("any", "secret")):
        page = page.replace(old, new)
    [program], [commands] = (re.findall(rf"```{name}\n(.*?)```", page, re.DOTALL) for name in ("python", "bash"))
    answer = client.completions.create(prompt=PROMPTS[3], max_tokens=16, model="tiny", temperature=0)
    capfd.readouterr()
    exec(program, {})
    text, _, hits = capfd.readouterr().out.rpartition(answer.choices[0].text)
    assert text == "" and int(hits) > 0
    chat, metrics = (subprocess.run(line, shell=True, capture_output=True).stdout for line in commands.splitlines())
    assert json.loads(chat)["usage"]["completion_tokens"] <= 8 and b"moectl_expert_hits_total" in metrics
