"""The metrics page for tests that have no event loop, or are on one already."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry

from serving.gateway.metrics.page import render_metrics


def rendered(
    registries: Sequence[CollectorRegistry],
    gateway_id: str | None = None,
    ours: Sequence[CollectorRegistry] = (),
) -> bytes:
    """The page, as Prometheus gets it."""
    with ThreadPoolExecutor(1) as other:
        page = other.submit(asyncio.run, render_metrics(registries, gateway_id, ours=ours))
        return page.result()[0]
