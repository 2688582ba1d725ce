"""The directory's book of slices, kept by the test itself over real raylets."""

import time
from collections.abc import Awaitable, Callable, Iterable

from serving.directory.ray_hosts import observe_cluster
from serving.directory.supply_book import SupplyBook
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import SliceFaults
from serving.domain.supply.pods import GroupPods
from serving.domain.supply.records import SupplyReport
from serving.domain.supply.survey import waiting_replicas


class BookKeeper:
    """What a directory tells a provisioner, and is told by it. `read_records`: of the replicas."""

    def __init__(self, read_records: Callable[[], Awaitable[Iterable[SliceRecord]]]) -> None:
        self._read_records = read_records
        self._pods: tuple[GroupPods, ...] = ()
        self._num_looks = 0
        self.book = SupplyBook(SliceFaults())

    async def report_pods(self, groups: tuple[GroupPods, ...]) -> None:
        """Takes in the pods that there are."""
        self._pods = groups

    async def read_supply(self) -> SupplyReport:
        """Looks, and tells everything."""
        records = list(await self._read_records())
        self.book.look(await observe_cluster(), self._pods, records, time.time())
        self._num_looks += 1
        return SupplyReport(f"test:{self._num_looks}", self.book.records, waiting_replicas(records))
