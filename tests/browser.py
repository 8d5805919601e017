"""A headless Chromium, spoken to over its debugging protocol: sizes, colour schemes, keys and what a page looks like."""

import asyncio
import base64
import itertools
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import which
from typing import Any

import aiohttp

START_S = 60.0
"""Most seconds until the browser listens."""


def chromium() -> str | None:
    """Command of the browser, if there is one."""
    return which("chromium") or which("chromium-browser") or which("google-chrome")


class Tab:
    """One page that the browser shows.

    Attributes:
        requests: addresses that the page asked for, its own and data apart. complaints: errors and warnings of its console.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            told = await self._socket.receive_json(timeout=START_S)
            if told.get("id") == number:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        if event["method"] == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))

    async def evaluate(self, code: str) -> Any:
        """Value of an expression in the page."""
        told = await self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def show(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Load a file at a width, in a colour scheme."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=file.resolve().as_uri())
        for _ in range(200):
            if await self.evaluate("document.readyState === 'complete' && location.protocol === 'file:'"):
                break
            await asyncio.sleep(0.05)
        assert await self.evaluate("innerWidth") == width

    async def key(self, name: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    async def mouse(self, kind: str, x: float, y: float) -> None:
        """A mouse event, "mouseMoved" or "mousePressed", in pixels of the window."""
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if kind != "mouseMoved" else "none")

    async def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def _tab(command: str) -> AsyncIterator[Tab]:
    with tempfile.TemporaryDirectory() as profile, Path(profile, "log").open("w") as log:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}/data", "--no-first-run", "about:blank"]
        browser = subprocess.Popen([command, *flags], stdout=log, stderr=log)
        try:
            port = await _port(browser, Path(log.name))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            browser.terminate()
            browser.wait(20)


async def _port(browser: subprocess.Popen[bytes], log: Path) -> int:
    """Port at which a browser that has just been started listens."""
    for _ in range(int(START_S / 0.1)):
        found = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", log.read_text())
        if found:
            return int(found[1])
        assert browser.poll() is None, log.read_text()
        await asyncio.sleep(0.1)
    raise TimeoutError(log.read_text())


def browse(work: Callable[[Tab], Coroutine[Any, Any, Any]]) -> Any:
    """Run `work` with a tab of a browser of its own."""
    command = chromium()
    assert command is not None

    async def run() -> Any:
        async with _tab(command) as tab:
            return await work(tab)

    return asyncio.run(run())
