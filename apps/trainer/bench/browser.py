"""A headless Chromium, driven by its DevTools protocol."""

# ruff: noqa: INP001 - next to scripts, no package

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

import aiohttp

Json = dict[str, Any]  # Any: JSON values
START_S = 30.0
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def found(name: str = "chromium") -> str | None:
    """Path of the browser; None where there is none."""
    return shutil.which(name)


class Browser:
    """A browser process while the context is open. Raises TimeoutError if it does not start."""

    def __init__(self, session: aiohttp.ClientSession, name: str = "chromium") -> None:
        self._session = session
        self._name = name
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self._process = await asyncio.create_subprocess_exec(
            self._name,
            *OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._stack.push_async_callback(self._end)
        port_file = Path(profile) / "DevToolsActivePort"
        async with asyncio.timeout(START_S):
            while not port_file.exists() or not port_file.read_text(encoding="utf-8").strip():
                await asyncio.sleep(0.05)
        self._address = f"http://127.0.0.1:{port_file.read_text(encoding='utf-8').splitlines()[0]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    @contextlib.asynccontextmanager
    async def tab(self) -> AsyncGenerator[Tab]:
        """A new tab."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as answer:
            address = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
        async with self._session.ws_connect(address, max_msg_size=0) as socket:
            tab = Tab(socket)
            reading = asyncio.create_task(tab.read())
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await tab.ask(f"{domain}.enable")
                yield tab
            finally:
                reading.cancel()


class Tab:
    """A page. `said` collects errors and warnings of its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Json]] = {}
        self.said: list[str] = []

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._asked.pop(content["id"]).set_result(content)
            elif content["method"] == "Runtime.exceptionThrown":
                self.said.append(json.dumps(content["params"]["exceptionDetails"])[:500])
            elif content["method"] == "Log.entryAdded":
                self.said.append(content["params"]["entry"]["text"])
            elif content["method"] == "Runtime.consoleAPICalled":
                self.said.append(json.dumps(content["params"]["args"])[:500])

    async def ask(self, method: str, timeout_s: float = 30.0, **params: Any) -> Json:  # Any: JSON values
        """Call a method of the protocol. Raises RuntimeError for its error."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        content = await asyncio.wait_for(answer, timeout_s)
        if "error" in content:
            raise RuntimeError(f"{method}: {content['error']}")
        return content["result"]

    async def open(self, address: str) -> None:
        """Go to a page."""
        await self.ask("Page.navigate", url=address)

    async def value(self, script: str, timeout_s: float = 30.0) -> Any:  # Any: what the script gives
        """The value of an expression, awaited. Raises RuntimeError for what it throws."""
        result = await self.ask("Runtime.evaluate", timeout_s, expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:1000])
        return result["result"].get("value")

    async def until(self, script: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not await self.value(script):
                await asyncio.sleep(0.05)

    async def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Set what the page has to draw on, and the colours that the system prefers."""
        is_phone = width < 600
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        for kind in ("keyDown", "keyUp"):
            more: Json = {"text": text} if text and kind == "keyDown" else {}
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], **more)
