"""What the TPU exporters of the fleet's hosts say of the chips, for the history of the fleet page.

Owns which hosts are asked, how often, and how long an answer counts. Does not own what it means
(`history_reading`). Prometheus reads the exporters by itself; this is for people without one.
"""

import asyncio
import http.client
import time
from collections.abc import Callable, Collection, Iterator

from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serving.dashboard.metric_sampling import TPU_SERIES

PERIOD_S = 10.0
# One that missed its turn is shown no longer: missing is better than stale.
MAX_AGE_S = 1.5 * PERIOD_S
# A gateway is no Prometheus: of a larger fleet no chips are shown, rather than those of some hosts.
MAX_HOSTS = 256
_NUM_AT_ONCE = 8
_TIMEOUT_S = 3.0
# An exporter's page of a host has some 100 kB at most.
_MAX_PAGE_BYTES = 4 * 1024 * 1024


def chip_families(page: str) -> list[Family]:
    """The families of `TPU_SERIES` on an exporter's page.

    Raises:
        ValueError: a line of one of them is not in Prometheus' text format.
    """
    names = tuple(f"{name}{{" for name in sorted(TPU_SERIES))
    wanted = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(names))
    return list(text_string_to_metric_families(wanted))


class TpuReader(Collector):
    """The chips of the hosts at `addresses()`, as far as their exporters answered lately."""

    def __init__(self, port: int, addresses: Callable[[], Collection[str]]) -> None:
        self._port = port
        self._addresses = addresses
        self._answers: dict[str, tuple[float, list[Family]]] = {}  # monotonic, by address

    async def follow(self) -> None:
        """Asks every host again and again, until cancelled."""
        while True:
            await self.read_once()
            await asyncio.sleep(PERIOD_S)

    async def read_once(self) -> None:
        """Asks every host once. One that does not answer, or not in the format, is left out."""
        addresses = set(self._addresses())
        if len(addresses) > MAX_HOSTS:
            addresses = set()
        self._answers = {each: self._answers[each] for each in addresses & self._answers.keys()}
        turn = asyncio.Semaphore(_NUM_AT_ONCE)
        await asyncio.gather(*(self._ask(address, turn) for address in addresses))

    def collect(self) -> Iterator[Family]:
        """The families of all hosts, one after the other."""
        oldest_s = time.monotonic() - MAX_AGE_S
        for read_at_s, families in self._answers.values():
            if read_at_s >= oldest_s:
                yield from families

    async def _ask(self, address: str, turn: asyncio.Semaphore) -> None:
        async with turn:
            try:
                families = await asyncio.to_thread(_read, address, self._port)
            except (OSError, http.client.HTTPException, ValueError):
                return
            self._answers[address] = (time.monotonic(), families)


def _read(address: str, port: int) -> list[Family]:
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"status {answer.status}")
        return chip_families(answer.read(_MAX_PAGE_BYTES).decode())
    finally:
        connection.close()
