"""Presents what one gateway does for batches, read at scrape time."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.gateway.batches.running.job import LineCounts
from serving.gateway.metrics.requests import Families


class MeteredLane(Protocol):
    """The interface of a gateway's batch lane; see `BatchLane`."""

    @property
    def counts(self) -> LineCounts:
        """What came of lines here since the start."""
        ...

    @property
    def num_leased(self) -> int:
        """The batches that this gateway works on."""
        ...


class BatchCollector(Collector):
    """Collects the lines that were answered here, and the batches at work."""

    def __init__(self, lane: MeteredLane) -> None:
        self._lane = lane

    def collect(self) -> Iterator[Family]:
        """Yields the present families."""
        families, counts = Families(), self._lane.counts
        lines = {
            "completed": counts.num_completed,
            "failed": counts.num_failed,
            "refused": counts.num_refused,
        }
        for outcome, number in lines.items():
            families.add("slicewise_batch_lines_total", {"outcome": outcome}, number)
        families.add("slicewise_batches_leased", {}, self._lane.num_leased)
        yield from families
