import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

_ON_BOTH_LOOPS = {"test_agent_proof.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config,
    item: pytest.Item,
) -> dict[str, Callable[[], Any]]:
    """Both loops for what leans on how they do TLS: agents run on uvloop, some tests do not."""
    factories: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in _ON_BOTH_LOOPS:
        factories["uvloop"] = uvloop.new_event_loop
    return factories
