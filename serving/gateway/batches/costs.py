"""What a batch costs while one gateway works on it, from the sums of that gateway's slice ledger.

Owns which part of the sums is whose. Does not own the sums (`serving.ledger`), nor where costs are
kept (`store`): the meter of a lease counts from when it is made, so that of several gateways each
counts the time in which the batch was its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serving.gateway.batches.records import BatchCost

_MS_PER_HOUR = 3_600_000

# Returns the chip-milliseconds of a batch by compute class, of the whole fleet, since some start.
ReadChips = Callable[[str], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class BatchPrices:
    """Where costs come from. `usd_per_chip_hour` is by compute class, for those with a price.

    Every cost of a line is in the sums `settled_s` after its answer.
    """

    read: ReadChips
    usd_per_chip_hour: Mapping[str, float]
    settled_s: float


class CostMeter:
    """Counts what one batch costs from now on."""

    def __init__(self, prices: BatchPrices, batch_id: str) -> None:
        self._prices = prices
        self._batch_id = batch_id
        self._taken = dict(prices.read(batch_id))

    def take(self) -> BatchCost:
        """Returns what has come since the last time, at the prices of now."""
        now = dict(self._prices.read(self._batch_id))
        before, self._taken = self._taken, now
        cost = BatchCost()
        for compute_class, chip_ms in now.items():
            # A ledger that has forgotten a batch begins it at zero again.
            new_ms = max(0, chip_ms - before.get(compute_class, 0))
            price = self._prices.usd_per_chip_hour.get(compute_class)
            if new_ms:
                usd = None if price is None else new_ms / _MS_PER_HOUR * price
                cost += BatchCost(new_ms, usd)
        return cost
