"""A page in headless Chromium, over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Page:
    """One tab."""

    socket: ClientConnection
    errors: list[str] = field(default_factory=list)
    """What the console, the network and the content policy complained of."""
    asked: list[str] = field(default_factory=list)
    """The URLs of all requests."""
    _session: str = ""
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)

    async def call(self, method: str, **params: object) -> Any:
        number = len(self._answers) + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self.socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        async with asyncio.timeout(120):
            return await self._answers[number]

    async def open(self, url: str) -> None:
        if not self._session:
            await self._attach()
        found = await self.call("Page.navigate", url=url)
        assert "errorText" not in found, found
        # Answered when the first bytes come: what is asked of a page half read finds no elements.
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run_first(self, script: str) -> None:
        """Run a script in each page that is opened from now on, before those of its own."""
        if not self._session:
            await self._attach()
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def _attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")

    async def appear(self, *, width: int, height: int, dark: bool = False) -> None:
        """Give the page a window of this many pixels, and a person who prefers this scheme of colours and no
        motion."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        wanted = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def evaluate(self, expression: str) -> Any:
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 15.0) -> None:
        async with asyncio.timeout(seconds):
            while not await self.evaluate(f"(async () => Boolean({expression}))()"):  # noqa: ASYNC110 - the page knows no events of ours
                await asyncio.sleep(0.1)

    async def screenshot(self) -> bytes:
        """As PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def listen(self) -> None:
        async for text in self.socket:
            message = json.loads(text)
            if "id" in message:
                answer = self._answers[message["id"]]
                if "error" in message:
                    answer.set_exception(RuntimeError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            elif message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
            elif _is_complaint(message):
                self.errors.append(json.dumps(message["params"]))


def _is_complaint(message: Any) -> bool:
    match message["method"]:
        case "Runtime.exceptionThrown":
            return True
        case "Runtime.consoleAPICalled":
            return message["params"]["type"] in ("error", "warning", "assert")
        case "Log.entryAdded":
            return message["params"]["entry"]["level"] in ("error", "warning")
    return False


@asynccontextmanager
async def browsing(directory: Path) -> AsyncIterator[Page]:
    """``directory`` is for the browser's profile."""
    assert CHROMIUM is not None
    argv = (
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
        *("--window-size=1200,1000", "--remote-debugging-port=0", f"--user-data-dir={directory}"),
    )
    process = await asyncio.create_subprocess_exec(*argv, stderr=DEVNULL, stdout=DEVNULL)
    try:
        at = await _address(directory / "DevToolsActivePort")
        async with connect(at, max_size=1 << 26) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            try:
                yield page
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        process.terminate()
        await process.wait()


async def _address(file: Path) -> str:
    """Of the browser's debugger, once it says it."""
    async with asyncio.timeout(120):
        while True:
            lines = await asyncio.to_thread(_lines, file)
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.05)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
