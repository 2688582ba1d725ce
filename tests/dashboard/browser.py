"""A headless Chromium, driven by the W3C WebDriver protocol: JSON over HTTP to ChromeDriver."""

import asyncio
import base64
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

DEADLINE_S = 30.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # W3C WebDriver's key of an element reference
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # for containers, where the tests run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One session with one tab."""

    def __init__(self, client: httpx.AsyncClient, session_id: str) -> None:
        self._client = client
        self._path = f"/session/{session_id}"

    async def open(self, url: str) -> None:
        """Opens an address and waits until it is loaded."""
        await self._command("POST", "/url", url=url)

    async def run(self, script: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page and returns what it returns."""
        return await self._command("POST", "/execute/sync", script=script, args=arguments)

    async def text(self, selector: str) -> str:
        """The text of the first element that fits, as it is rendered; empty if there is none."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return " ".join(str(await self.run(script, selector)).split())

    async def texts(self, selector: str) -> list[str]:
        """The texts of all elements that fit and are shown."""
        script = """return [...document.querySelectorAll(arguments[0])]
            .filter((node) => node.checkVisibility()).map((node) => node.innerText)"""
        return [" ".join(text.split()) for text in await self.run(script, selector)]

    async def until(self, script: str, *arguments: Any) -> Any:
        """Waits until a script returns something true, and returns it."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (value := await self.run(script, *arguments)):  # noqa: ASYNC110 - far away
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.text("body")
            raise AssertionError(f"never true: {script} {arguments}; the page: {shown}") from None
        return value

    async def until_text(self, selector: str, words: str) -> None:
        """Waits until the first element that fits shows these words."""
        script = """return (document.querySelector(arguments[0])?.innerText ?? '')
            .replace(/\\s+/g, ' ').includes(arguments[1])"""
        await self.until(script, selector, words)

    async def click(self, selector: str) -> None:
        """Clicks as a mouse does: refused when something lies above."""
        await self._command("POST", f"/element/{await self._find(selector)}/click")

    async def type(self, selector: str, text: str) -> None:
        """Types into a field, key by key."""
        await self._command("POST", f"/element/{await self._find(selector)}/value", text=text)

    async def press(self, *keys: str) -> None:
        """Presses keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        await self._command("POST", "/actions", actions=[keyboard])

    async def emulate(self, width: int, height: int, *, scheme: str = "light") -> None:
        """Sets the window's size and the colour scheme that the reader prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self._devtools("Emulation.setEmulatedMedia", {"features": features})

    async def screenshot(self) -> bytes:
        """The whole page as PNG, the part below the window too."""
        params = {"format": "png", "captureBeyondViewport": True}
        answer = await self._devtools("Page.captureScreenshot", params)
        return base64.b64decode(answer["data"])

    async def complaints(self) -> list[str]:
        """What the browser's console has got of errors since this was asked last."""
        entries = await self._command("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    async def close(self) -> None:
        """Ends the session and its browser."""
        await self._command("DELETE", "")

    async def _devtools(self, cmd: str, params: dict[str, Any]) -> Any:
        return await self._command("POST", "/goog/cdp/execute", cmd=cmd, params=params)

    async def _find(self, selector: str) -> str:
        found = await self._command("POST", "/element", using="css selector", value=selector)
        return str(found[_ELEMENT])

    async def _command(self, method: str, path: str, **body: Any) -> Any:
        answer = await self._client.request(
            method, self._path + path, json=body if method == "POST" else None
        )
        return _value(answer)


@asynccontextmanager
async def browser(extra_flags: Sequence[str] = ()) -> AsyncIterator[Browser]:
    """A fresh browser with a profile of its own; ended with everything it started."""
    driver = await asyncio.create_subprocess_exec(
        "chromedriver", "--port=0", stdout=asyncio.subprocess.PIPE
    )
    try:
        with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as profile:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{await _port(driver)}",
                timeout=DEADLINE_S,
                trust_env=False,
            ) as client:
                options = {"args": [*_FLAGS, f"--user-data-dir={profile}", *extra_flags]}
                capabilities = {
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                }
                wanted = {"capabilities": {"alwaysMatch": capabilities}}
                session = _value(await client.post("/session", json=wanted))
                subject = Browser(client, session["sessionId"])
                try:
                    yield subject
                finally:
                    await subject.close()
    finally:
        driver.terminate()
        # What it still says is read, so that it does not end with a full pipe.
        await driver.communicate()


async def _port(driver: asyncio.subprocess.Process) -> int:
    assert driver.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        async for line in driver.stdout:
            if match := re.search(rb"started successfully on port (\d+)", line):
                return int(match[1])
    raise AssertionError("chromedriver ended before it listened")


def _value(answer: httpx.Response) -> Any:
    value = answer.json()["value"]
    assert answer.is_success, f"{value['error']}: {value['message']}"
    return value
