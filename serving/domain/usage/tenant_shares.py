"""Whose turn it is, of tenants that have requests waiting: by the work that each has had. Pure.

The rule is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24): each tenant
has a counter of work, divided by its weight; the least one is next; one that begins to wait is
lifted to the least of those that wait, so that nobody saves up turns by asking for nothing. As long
as engines have room there are no turns, and anybody may have all of it.
"""

from collections.abc import Hashable, Iterable

# What a token of an output weighs, in tokens of prompts that no cache had: the paper's 2. What it
# takes of an engine depends on the batch: from two to some ten.
OUTPUT_WEIGHT = 2.0


def work_of(computed_tokens: float, output_tokens: float) -> float:
    """Returns the work of a request, in tokens of prompts that had to be computed."""
    return computed_tokens + OUTPUT_WEIGHT * output_tokens


class TenantShares:
    """The counters of tenants in one place; what names one is up to the caller."""

    def __init__(self) -> None:
        self._had: dict[Hashable, float] = {}
        self._now = 0.0  # the counter of whoever had the last turn

    def had(self, tenant: Hashable) -> float:
        """Returns the work that a tenant has had, by its weight; 0 of one that never came."""
        return self._had.get(tenant, 0.0)

    def begins_to_wait(self, tenant: Hashable, others: Iterable[Hashable]) -> None:
        """Notes a tenant that had nothing waiting; `others` have."""
        least = min(map(self.had, others), default=self._now)
        self._had[tenant] = max(self.had(tenant), least)

    def has_turn(self, tenant: Hashable, work: float, weight: float) -> None:
        """Charges what a request is expected to take; `weight` is that of its key."""
        self._now = self.had(tenant)
        self._had[tenant] = self._now + work / weight

    def settle(self, tenant: Hashable, less: float, weight: float) -> None:
        """Gives back what a request did not take of its charge, or charges the rest if negative."""
        self._had[tenant] = self.had(tenant) - less / weight
