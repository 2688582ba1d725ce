import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both loops: they differ in what runs first after a pause, and in how they buffer writes."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
