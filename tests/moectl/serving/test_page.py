"""The page of a server in a browser, and the page of the documents."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from openai import OpenAI

from moectl.bundled import demo_model
from moectl.commands.start.serve.server import Server
from moectl.serving.guard import LOOPBACK, ServerLimits
from moectl.serving.metrics import live
from runtime.model.open import open_model
from runtime.policies.presets import presets
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
# A reply begins with thinking where the last message says so.
TEMPLATE = (
    "{% for one in messages %}{{ one.content }}\n{% endfor %}"
    "{% if 'think' in messages[-1].content %}<think>\n{% endif %}{# </think> #}"
)
HOSTILE = """<img src=x onerror="window.hit = 1"> <script>window.hit = 1</script>

[a](javascript:window.hit=1) ![b](http://elsewhere.example/b.png) <a href=x onclick="hit=1">c</a>

```html
<svg onload="window.hit = 1">
```

| d |
|---|
| **e** <br> f |
"""
KEPT = {
    "id": "2026-01-01T00:00:00.000Z-aaaa",
    "name": "",
    "system": "",
    "messages": [
        {"role": "user", "content": "<b>What</b> is this?"},
        {
            "role": "assistant",
            "content": HOSTILE,
            "reasoning": "<i>Hm</i>",
            "thought_s": 3.21,
            "calls": [{"name": "<u>look", "arguments": '{"at": "<s>"}'}],
            "told": "9 tokens",
        },
    ],
}
DONE = "!document.getElementById('send').hidden"


@dataclass(frozen=True, slots=True)
class Browser:
    """A tab at the page of a server, and the loop that it lives on; downloads go to `folder`."""

    runner: asyncio.Runner
    tab: Tab
    server: Running
    folder: Path

    def run(self, steps: Coroutine[None, None, None]) -> None:
        self.runner.run(steps)

    async def show(self, view: str, *conversations: dict, **settings: float) -> None:
        """Open a view of the page with these conversations and settings kept."""
        kept = {f"moectl.conversation.{one['id']}": one for one in conversations}
        texts = {
            name: json.dumps(one) for name, one in {"moectl.settings": settings, **kept}.items()
        }
        await self.tab.value(
            f"localStorage.clear(); Object.assign(localStorage, {json.dumps(texts)}); "
            f"isOld = true; location.hash = '{view}'"
        )
        await self.tab.call("Page.reload")
        await self.tab.until(
            "!window.isOld && document.getElementById('about').textContent.includes('fast tier')"
        )

    async def send(self, text: str) -> None:
        await self.tab.type("text", text)
        await self.tab.press("Enter")
        await self.tab.until(f"!{DONE}")

    async def texts(self, selector: str) -> list[str]:
        return await self.tab.value(
            f"[...document.querySelectorAll('{selector}')].map(one => one.textContent)"
        )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page of the bundled model, unlocked by keyboard."""
    folder = tmp_path_factory.mktemp("page")
    opened = open_model(str(demo_model()))
    opened.tokenizer.chat_template = TEMPLATE
    limits = ServerLimits(max_tokens=60)
    slowly = replace(SETTINGS, link="10MB/s")  # or an answer has ended before Escape is pressed
    with (
        serving(opened, slowly, limits, folder / "none.duckdb") as server,
        asyncio.Runner() as runner,
    ):
        stack = AsyncExitStack()
        tab = runner.run(stack.enter_async_context(browsing(folder)))
        try:
            runner.run(_unlock(tab, server, folder))
            yield Browser(runner, tab, server, folder)
        finally:
            runner.run(stack.aclose())


async def _unlock(tab: Tab, server: Running, folder: Path) -> None:
    await tab.open(f"{server.url}/", width=1280, height=900)
    downloads = {"behavior": "allow", "downloadPath": str(folder)}
    await tab.call("Browser.setDownloadBehavior", **downloads)
    await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)  # or nothing can be copied
    await tab.until("document.getElementById('said').textContent.includes('wants an API key')")
    await tab.type("key", "secret")
    await tab.press("Enter")
    await tab.until("document.getElementById('about').textContent.includes('fast tier')")
    tab.said.clear()  # that the key was wanted


@needs_browser
def test_turns_of_a_chat(browser: Browser) -> None:
    """Sent, stopped, edited, made anew and kept; with settings from the drawer, by keyboard."""
    browser.run(_turns(browser))


async def _turns(browser: Browser) -> None:
    tab = browser.tab
    before = browser.server.scheduler.tally.read()["requests"]["left"]
    await browser.show("chat")
    await tab.type("text", "Return")
    await tab.press("Enter", shift=True)
    await browser.send("the number of")
    await tab.until("document.querySelector('.assistant > .text').textContent.length > 9")
    assert re.fullmatch(r"\d+ tokens.*", (await browser.texts(".assistant .foot small"))[0])
    await tab.press("Escape")
    await tab.until(DONE)
    await asyncio.to_thread(idle, browser.server)
    assert browser.server.scheduler.tally.read()["requests"]["left"] == before + 1
    assert (await browser.texts(".foot small"))[1].endswith("; stopped")
    assert await browser.texts(".user .text") == ["Return\nthe number of"]

    await tab.value("document.getElementById('show-settings').focus()")
    await tab.press("Enter")
    await tab.type("set-max_tokens", "7")
    await tab.type("set-min_p", "0.1")
    await tab.type("system", "Be brief.")
    await tab.value("document.querySelector('#settings .first').focus()")
    await tab.press("Enter")
    assert await browser.texts("#show-settings") == ["Settings (3)"]

    await tab.value("document.querySelector('.user .foot button:last-child').click()")
    await tab.value("document.querySelector('.edit textarea').value = 'x = 1'")
    await tab.value("document.querySelector('.edit .first').click()")
    await tab.until(f"{DONE} && document.querySelector('.assistant')")
    assert await browser.texts(".user .text") == ["x = 1"]
    await tab.value("document.querySelector('.assistant .foot button:last-child').click()")
    await tab.until(f"!{DONE}")
    await tab.until(DONE)
    told = (await browser.texts(".foot small"))[1]
    assert re.fullmatch(r"7 tokens, [\d.]+ per second, hit rate .* %, stall \d+ ms; ended .*", told)
    await tab.call("Page.reload")
    await tab.until("document.querySelectorAll('.turn').length === 2")
    assert await browser.texts(".foot small") == ["", told]
    [kept] = await tab.value(
        "Object.keys(localStorage).filter(key => key.includes('conversation'))"
    )
    assert json.loads(await tab.value(f"localStorage['{kept}']"))["system"] == "Be brief."


@needs_browser
def test_the_experts_of_an_answer_are_told_by_token(browser: Browser) -> None:
    """By mouse and by keyboard, and again after a reload; they add up to the hit rate."""
    browser.run(_experts(browser))


async def _experts(browser: Browser) -> None:
    tab = browser.tab
    await browser.show("chat", max_tokens=6)
    await browser.send("sheep")
    await tab.until(DONE)
    [share] = re.findall(r"hit rate (.*?),", (await browser.texts(".foot small"))[1])
    assert await browser.texts(".experts summary") == [f"Its experts: {share} were there"]
    await tab.call("Page.reload")
    await tab.until("document.querySelectorAll('.turn').length === 2")
    await tab.point(".strip", 3, 3)
    await tab.until(
        "document.querySelector('.experts .key').textContent.startsWith('Token 1 of 6')"
    )
    told = (await browser.texts(".experts .key"))[0]
    assert re.search(
        r"with the prompt: \d+ experts were there, \d+ were not .*stall [\d.]+ ms", told
    )
    await tab.value("document.querySelector('.experts input').focus()")
    await tab.press("ArrowUp")
    assert (await browser.texts(".experts .key"))[0].startswith("Token 2 of 6")


@needs_browser
def test_thinking_streams_into_a_fold(browser: Browser) -> None:
    browser.run(_thinking(browser))


async def _thinking(browser: Browser) -> None:
    tab = browser.tab
    await browser.show("chat", max_tokens=6)
    await browser.send("think of sheep")
    await tab.until(
        "document.querySelector('.thinking summary').textContent.startsWith('Thinks, ')"
    )
    await tab.until(DONE)
    assert re.fullmatch(r"Thought for [\d.]+ s", (await browser.texts(".thinking summary"))[0])
    assert not await tab.value("document.querySelector('.thinking').open")
    assert (await browser.texts(".thinking .text"))[0] and await browser.texts(
        ".assistant > .text"
    ) == [""]


@needs_browser
def test_a_hostile_text_is_only_text(browser: Browser) -> None:
    """In every place where a conversation shows one; Markdown is obeyed, the code copied as is."""
    browser.run(_hostile(browser))


async def _hostile(browser: Browser) -> None:
    tab = browser.tab
    await browser.show("chat", KEPT)
    body = ".assistant > .text"
    assert await tab.value("[window.hit, document.images.length, document.scripts.length]") == [
        None,
        0,
        3,
    ]
    links = f"[...document.querySelectorAll('{body} a')]"
    assert await tab.value(f"{links}.map(one => [one.getAttribute('href'), one.rel])") == [
        [None, "noopener noreferrer"],
        ["http://elsewhere.example/b.png", "noopener noreferrer"],
    ]
    [text] = await browser.texts(f"{body} > p:first-child")
    assert text == HOSTILE.splitlines()[0]
    assert await browser.texts(f"{body} td strong") == ["e"]
    assert await browser.texts(".user .text") == ["<b>What</b> is this?"]
    assert await browser.texts(".thinking > *") == ["Thought for 3.2 s", "<i>Hm</i>"]
    assert await browser.texts(".call > *") == ["Calls <u>look", '{"at": "<s>"}']
    await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    await tab.value("document.querySelector('.framed button').click()")
    await tab.until("document.querySelector('.framed button').textContent === 'Copied'")
    assert await tab.value("navigator.clipboard.readText()") == '<svg onload="window.hit = 1">\n'
    # not even a mistake of ours could
    assert await tab.value("document.body.innerHTML = '<p>'") is None
    async with asyncio.timeout(20):
        while not tab.said:
            await asyncio.sleep(0.05)
    assert "TrustedHTML" in tab.said.pop() and not tab.said


@needs_browser
def test_conversations_are_renamed_exported_and_deleted(browser: Browser) -> None:
    browser.run(_conversations(browser))


async def _conversations(browser: Browser) -> None:
    tab = browser.tab
    other = KEPT | {"id": "2025-01-01T00:00:00.000Z-bbbb", "name": "Older", "messages": []}
    await browser.show("chat", KEPT, other)
    assert await browser.texts("#list .name") == ["<b>What</b> is this?", "Older"]
    await tab.value("document.querySelector('#list .buttons button').focus()")
    await tab.press("Enter")
    await tab.call("Input.insertText", text="Renamed")
    await tab.press("Enter")
    await tab.until("document.getElementById('name').textContent === 'Renamed'")
    await tab.value("document.querySelector('#list .buttons button:nth-child(2)').click()")
    exported = browser.folder / "conversation.json"
    async with asyncio.timeout(20):
        while not exported.is_file():
            await asyncio.sleep(0.05)
    assert json.loads(exported.read_text()) == KEPT | {"name": "Renamed"}
    for answer, left in (("Escape", ["Renamed", "Older"]), ("Enter", ["Older"])):
        await tab.value("document.querySelector('#list .buttons button:nth-child(3)').click()")
        await tab.value("document.getElementById('question-yes').focus()")
        await tab.press(answer)
        await tab.until("!document.getElementById('question').open")
        await tab.until(f"document.querySelectorAll('#list .name').length === {len(left)}")
        assert await browser.texts("#list .name") == left


@needs_browser
def test_what_it_costs(browser: Browser) -> None:
    """The figures are the server's; another preset is taken by keyboard; nothing else is asked."""
    tab = browser.tab
    tab.asked.clear()
    browser.run(_costs(browser))
    asked = {url.removeprefix(browser.server.url) for url in tab.asked}
    assert {"/live", "/preset"} <= asked
    assert all(url in ("/", "/live", "/preset") or url.startswith("/page/") for url in asked)
    assert not tab.said


async def _costs(browser: Browser) -> None:
    tab = browser.tab
    scheduler = browser.server.scheduler
    asked = {"prompt": "sheep", "max_tokens": 9, "user": "<b>Ann", **EXACT}
    await asyncio.to_thread(browser.server.client().completions.create, **asked)
    await browser.show("costs")
    total = scheduler.tally.read()["generated_tokens"]
    await tab.until(f"document.getElementById('speed-more').textContent === '{total:,} so far'")
    assert len(await browser.texts("#misses-chart .layer")) == 8
    assert any(text.startswith("<b>Ann19") for text in await browser.texts("#owners tr"))
    assert await browser.texts("#requests") == ["running 0, waiting 0"]
    lit = "document.getElementById('residency').getAttribute('aria-label')"
    held = re.findall(r"(\d+) of 32 resident", await tab.value(lit))
    assert sum(map(int, held)) == scheduler.receipt["slots"] == 64
    for one in live(scheduler)["last_token"]:
        experts = " ".join(map(str, one["hit"] + one["missed"]))
        await tab.until(f"{lit}.includes('the last tokens used {experts}')")
    offered = await browser.texts("#preset option")
    assert "horizon" in offered and not any(presets()[name].is_study for name in offered)
    await tab.value("document.getElementById('preset').focus()")
    reached = []
    for _ in range(3):
        await tab.press("Tab")
        reached.append(
            await tab.value("document.activeElement.id || document.activeElement.textContent")
        )
    assert reached[:2] == ["Switch", "more"]
    await tab.value("document.getElementById('more').click()")
    assert "buddymoe-zero" in await browser.texts("#preset option")
    await tab.value("document.getElementById('preset').value = 'near'")
    await tab.value("document.querySelector('#switch button').focus()")
    await tab.press("Enter")
    await tab.until("document.getElementById('said').textContent === 'near is in force.'")
    await tab.until("document.getElementById('about').textContent.includes(' near:')")
    assert scheduler.preset == "near"
    scheduler.switch("on-demand").settled.result()


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_both_views_suit_everybody(browser: Browser, width: int, scheme: str) -> None:
    """At two widths, light and dark: axe-core finds nothing, nothing is wider than the page, and
    what is written stays in reach."""
    browser.run(_suits(browser, width, scheme))


async def _suits(browser: Browser, width: int, scheme: str) -> None:
    tab = browser.tab
    costs = [{"text": "a", "there": 3, "away": 1, "ms": 2.5, "layers": "09"}]
    turns = [*KEPT["messages"][:1], KEPT["messages"][1] | {"costs": 40 * costs}]
    await browser.show("chat", KEPT | {"messages": 3 * turns})
    await tab.look(width, scheme)
    await tab.picture(browser.folder / f"chat-{width}-{scheme}.png")
    assert await tab.value("document.getElementById('ask').getBoundingClientRect().bottom") <= 900
    assert await tab.faults() == []
    await tab.value("document.getElementById('show-settings').click()")
    assert await tab.faults() == []
    await tab.value("document.getElementById('settings').close(); location.hash = 'costs'")
    await tab.look(width, scheme)
    await tab.picture(browser.folder / f"costs-{width}-{scheme}.png")
    assert await tab.faults() == []
    await tab.look(*LOOKS[0])


@needs_browser
def test_an_error_leaves_what_was_written(browser: Browser) -> None:
    """Where the key is wrong, and while the model loads."""
    browser.run(_errors(browser))


async def _errors(browser: Browser) -> None:
    tab = browser.tab
    await browser.show("chat")
    await tab.value("sessionStorage.setItem('moectl.key', 'wrong')")
    await tab.type("text", "again")
    await tab.press("Enter")
    said = "document.getElementById('chat-said').textContent"
    await tab.until(f"{said} === 'the API key is wrong'")
    await tab.until("document.getElementById('text').value === 'again'")
    assert not await browser.texts(".turn")
    await tab.value("sessionStorage.setItem('moectl.key', 'secret')")
    server = Server("tiny", ServerLimits(), api_key=None, hosts=LOOPBACK)
    with socket.create_server(("127.0.0.1", 0)) as listening, server.answering(listening):
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        await tab.call("Page.navigate", url=f"{url}#costs")
        await tab.until(
            "document.getElementById('said')?.textContent.startsWith('The model is loading (')"
        )
        assert (
            await tab.value("document.querySelector('.costs').getAttribute('aria-busy')") == "true"
        )
        await tab.call("Page.navigate", url=f"{url}#chat")
        await tab.type("text", "sheep")
        await tab.press("Enter")
        await tab.until(f"{said}.startsWith('tiny is loading: try again')")
        await tab.until("document.getElementById('text').value === 'sheep'")
        await tab.call("Page.navigate", url=f"{browser.server.url}/")
        await tab.until("document.getElementById('about')?.textContent.includes('fast tier')")


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
    [program, *others], [commands] = (
        re.findall(rf"```{name}\n(.*?)```", page, re.DOTALL) for name in ("python", "bash")
    )
    answer = client.completions.create(
        prompt=PROMPTS[3], max_tokens=16, model="tiny", temperature=0
    )
    capfd.readouterr()
    names: dict[str, object] = {}
    exec(program, names)
    text, _, hits = capfd.readouterr().out.rpartition(answer.choices[0].text)
    assert text == "" and int(hits) > 0
    for other in others:
        exec(other, names)
    chat, metrics = (
        subprocess.run(line, shell=True, capture_output=True).stdout
        for line in commands.splitlines()
    )
    assert (
        json.loads(chat)["usage"]["completion_tokens"] <= 8
        and b"moectl_expert_hits_total" in metrics
    )
