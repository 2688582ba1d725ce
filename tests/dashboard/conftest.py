"""A browser for each test module of this folder that asks for one."""

from collections.abc import AsyncIterator

import pytest_asyncio

from .browser import Browser, browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def page(chromium: Browser) -> Browser:
    """An empty page. What a test stores stays with its server's port."""
    await chromium.open("about:blank")
    await chromium.emulate(1360, 2000)
    await chromium.complaints()
    return chromium
