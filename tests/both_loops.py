"""Runs asynchronous tests on asyncio's loop and on uvloop, where a `conftest` imports the hook.

The product runs on uvloop. They differ in what runs first after a pause, in how they buffer writes,
and in what a timer that is due at once is.
"""

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Returns both loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
