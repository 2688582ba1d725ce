"""The output tokens of batches at one engine, so that gateways know what each batch has cost.

Batches come and go without end: of one that has nothing here for a while the count is forgotten.
No clock: callers pass times of one clock, whichever it is.
"""

from collections import Counter
from collections.abc import Iterable

# Many times what lies between two reports to a gateway.
FORGOTTEN_S = 300.0

# By tenant, something of each of its batches.
_ByBatch = dict[str, dict[str, int]]
_Key = tuple[str, str]  # the tenant and the batch


class BatchCounts:
    """Counts the tokens of each batch."""

    def __init__(self) -> None:
        self._tokens: Counter[_Key] = Counter()
        self._seen_at_s: dict[_Key, float] = {}
        self._is_fresh: set[_Key] = set()  # has had tokens since the last report

    def add(self, tenant: str, batch_id: str, num_tokens: int) -> None:
        """Counts tokens of a batch."""
        key = tenant, batch_id
        self._tokens[key] += num_tokens
        self._is_fresh.add(key)

    def report(self, present: Iterable[_Key], now_s: float) -> tuple[_ByBatch, _ByBatch]:
        """Returns the tokens and the sequences of batches; `present` has each sequence once."""
        sequences = Counter(present)
        self._seen_at_s |= dict.fromkeys(self._is_fresh | sequences.keys(), now_s)
        self._is_fresh.clear()
        for key in [key for key, at_s in self._seen_at_s.items() if at_s < now_s - FORGOTTEN_S]:
            del self._seen_at_s[key]
            self._tokens.pop(key, None)
        return _by_tenant(self._tokens), _by_tenant(sequences)


def _by_tenant(counts: Counter[_Key]) -> _ByBatch:
    found: _ByBatch = {}
    for (tenant, batch_id), count in counts.items():
        found.setdefault(tenant, {})[batch_id] = count
    return found
