"""The chips of the fleet's hosts as their TPU exporters report them, for the history.

Owns which hosts are asked, how often, and how long an answer counts. Does not own what it means
(`metric_sampling`). Prometheus reads the exporters by itself; this is for fleets without it.
"""

import asyncio
import http.client
import time
from collections.abc import Awaitable, Callable, Collection, Iterator

from prometheus_client.parser import text_string_to_metric_families

from serving.dashboard.metric_sampling import TPU_SERIES, TpuSample

PERIOD_S = 10.0
# An older answer, whose successor failed, is not shown: missing is better than stale.
MAX_AGE_S = 1.5 * PERIOD_S
# A dashboard is no Prometheus: for a larger fleet it shows no chips, rather than some of them.
MAX_HOSTS = 256
_NUM_AT_ONCE = 8
_TIMEOUT_S = 3.0
# An exporter's page of a host has some 100 kB at most.
MAX_PAGE_BYTES = 4 * 1024 * 1024


def chip_samples(page: str) -> list[TpuSample]:
    """Returns the samples of `TPU_SERIES` on an exporter's page.

    Raises:
        ValueError: a line of one of them is not in Prometheus' text format.
    """
    names = tuple(f"{name}{{" for name in sorted(TPU_SERIES))
    wanted = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(names))
    return [
        TpuSample(sample.labels.get("model", ""), sample.name, sample.value)
        for family in text_string_to_metric_families(wanted)
        for sample in family.samples
    ]


class ExporterScraper:
    """The chips of the hosts at `addresses()`, as far as their exporters answered lately."""

    def __init__(self, port: int, addresses: Callable[[], Awaitable[Collection[str]]]) -> None:
        self._port = port
        self._addresses = addresses
        self._answers: dict[str, tuple[float, list[TpuSample]]] = {}  # monotonic, by address

    async def follow(self) -> None:
        """Asks every host again and again, until cancelled."""
        while True:
            await self.scrape_once()
            await asyncio.sleep(PERIOD_S)

    async def scrape_once(self) -> None:
        """Asks every host once. The last answer of a host stays where the new one is unusable."""
        addresses = set(await self._addresses())
        if len(addresses) > MAX_HOSTS:
            addresses = set()
        self._answers = {
            address: self._answers[address] for address in addresses & self._answers.keys()
        }
        turn = asyncio.Semaphore(_NUM_AT_ONCE)
        await asyncio.gather(*(self._ask(address, turn) for address in addresses))

    def read(self) -> Iterator[TpuSample]:
        """Yields the samples of all hosts, one after the other."""
        oldest_s = time.monotonic() - MAX_AGE_S
        for scraped_at_s, samples in self._answers.values():
            if scraped_at_s >= oldest_s:
                yield from samples

    async def _ask(self, address: str, turn: asyncio.Semaphore) -> None:
        async with turn:
            try:
                samples = await asyncio.to_thread(_scrape, address, self._port)
            except (OSError, http.client.HTTPException, ValueError):
                return
            self._answers[address] = (time.monotonic(), samples)


def _scrape(address: str, port: int) -> list[TpuSample]:
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"status {answer.status}")
        page = answer.read(MAX_PAGE_BYTES + 1)
        if len(page) > MAX_PAGE_BYTES:  # cut off, its last line could still be a number
            raise http.client.HTTPException(f"more than {MAX_PAGE_BYTES} bytes")
        return chip_samples(page.decode())
    finally:
        connection.close()
