"""A real browser, driven over the DevTools protocol: keyboard input and a chosen width."""

import asyncio
import base64
import lzma
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome", "chromium-browser"))),
    None,
)
needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason=(
        "no chromium or chrome is installed: apt-get install chromium, or put either on the PATH"
    ),
)
AXE = Path(__file__).parents[1] / "data" / "axe.min.js.xz"  # 4.14.1, of npm's axe-core (MPL 2.0)
LOOKS = [(width, scheme) for width in (1280, 400) for scheme in ("light", "dark")]
_QUIET = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


class Tab:
    """One page. `said` holds console output and uncaught errors, `asked` the requested
    addresses."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self._socket = socket
        self._answers = {}
        self._number = 0
        self._listening = asyncio.create_task(self._listen())

    async def open(self, url: str, *, width: int, height: int) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        await self.call("Page.navigate", url=url)

    async def type(self, where: str, text: str) -> None:
        """Type a text into the element with this id."""
        await self.value(f"document.getElementById('{where}').focus()")
        await self.call("Input.insertText", text=text)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def until(self, condition: str, *, within_s: float = 60.0) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(within_s):
            while not await self.value(f"Boolean({condition})"):
                await asyncio.sleep(0.05)

    async def value(self, expression: str) -> object:
        """Return the value of a JavaScript expression, or what its promise is kept with; None if it
        throws."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return found["result"].get("value")

    async def look(self, width: int, scheme: str) -> None:
        """Show the page at this width, `light` or `dark`, without motion; asserts that it does not scroll
        sideways."""
        await self.size(width, 900)
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": scheme},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )
        assert await self.value("document.documentElement.scrollWidth") <= width, (
            f"too wide for {width} pixels"
        )

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, " ": 32}
        told = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes[key],
        }
        told |= {"modifiers": 8} if shift else {}
        text = {"Enter": "\r", " ": " "}.get(key)
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", **told, **({"text": text} if text else {})
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    async def point(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a place in an element, from its left upper corner."""
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        left, top = [await self.value(f"{box}.{side}") for side in ("left", "top")]
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + x, y=top + y)

    async def faults(self) -> list[str]:
        """Return the rules that axe-core finds broken, with the elements."""
        if not await self.value("Boolean(window.axe)"):
            await self.value(lzma.decompress(AXE.read_bytes()).decode())
        found = await self.value("axe.run().then(found => found.violations)")
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]

    async def picture(self, path: Path) -> None:
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def call(self, method: str, **parameters: object) -> dict:
        self._number += 1
        self._answers[self._number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        return await answer

    async def _listen(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                assert "error" not in told, told
                self._answers.pop(told["id"]).set_result(told["result"])
            elif told["method"] == "Network.requestWillBeSent":
                self.asked.append(told["params"]["request"]["url"])
            elif told["method"] in (
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
            ):
                self.said.append(str(told["params"]))


@asynccontextmanager
async def browsing(scratch: Path) -> AsyncIterator[Tab]:
    """A tab in a new browser, which is ended afterwards."""
    profile = scratch / "profile"
    own = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
    )
    process = subprocess.Popen(
        [BROWSER, *own, *_QUIET, "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(30):
            while (
                not (told := profile / "DevToolsActivePort").is_file()
                or len(told.read_text().split()) < 2
            ):
                await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as client:
            tabs = await (await client.get(f"http://127.0.0.1:{port}/json")).json()
            page = next(tab for tab in tabs if tab["type"] == "page")
            async with client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        process.wait(timeout=10)
