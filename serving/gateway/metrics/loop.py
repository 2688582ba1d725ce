"""Shows how long the gateway's event loop stood still, read at scrape time."""

from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.gateway.metrics.requests import Families
from serving.telemetry.loop_turns import LoopTurns


class LoopCollector(Collector):
    """Collects the longest turn of one event loop, and the most CPU time of one."""

    def __init__(self, turns: LoopTurns) -> None:
        self._turns = turns

    def collect(self) -> Iterator[Family]:
        """Yields the present families."""
        families = Families()
        families.add("slicewise_gateway_longest_turn_seconds", {}, self._turns.longest_s)
        families.add("slicewise_gateway_longest_turn_cpu_seconds", {}, self._turns.longest_cpu_s)
        yield from families
