"""Decides when a class that failed is asked again: after a while, longer after each episode.

An episode lasts from the first failure until the class delivers, no order is late, and none waits
that was made before the last failure. So a drought that gives one slice a minute is one episode,
however many orders are late in it one after the other. Deterministic: time comes in.
"""

import math
from dataclasses import dataclass

from autoscaling.policy.memory import BackoffRecord
from autoscaling.policy.rules import Rules

# After so long without a failure, the next one backs off for the shortest time again.
_RESET_AFTER_S = 6 * 3600.0


@dataclass(slots=True)
class Backoff:
    """The back-off of one class. `reason` is its last failure, in words."""

    rules: Rules
    reason: str = ""
    _until_s: float = -math.inf
    _failed_at_s: float = -math.inf
    _length_s: float = 0.0
    _is_out_of_stock: bool = False
    _is_in_episode: bool = False

    @classmethod
    def from_record(cls, rules: Rules, record: BackoffRecord) -> "Backoff":
        """Returns the back-off as it was; a shorter one where `rules` allow less by now."""
        return cls(
            rules,
            record.reason,
            -math.inf if record.until_s is None else record.until_s,
            -math.inf if record.failed_at_s is None else record.failed_at_s,
            min(record.length_s, rules.max_backoff_s),
            record.is_out_of_stock,
            record.is_in_episode,
        )

    def to_record(self) -> BackoffRecord:
        """Returns all of it."""
        return BackoffRecord(
            reason=self.reason,
            until_s=None if math.isinf(self._until_s) else self._until_s,
            failed_at_s=None if math.isinf(self._failed_at_s) else self._failed_at_s,
            length_s=self._length_s,
            is_out_of_stock=self._is_out_of_stock,
            is_in_episode=self._is_in_episode,
        )

    @property
    def is_out_of_stock(self) -> bool:
        """Returns whether the class has delivered nothing since its last failure."""
        return self._is_out_of_stock

    def is_over(self, now_s: float) -> bool:
        """Returns whether the class may be asked again."""
        return not self._is_out_of_stock and now_s >= self._until_s

    def observe(
        self,
        now_s: float,
        failure: str | None,
        *,
        has_delivered: bool,
        oldest_order_at_s: float | None,
    ) -> None:
        """Records whether the class fails now, and why; `None`: it does not.

        `oldest_order_at_s` is when the oldest order that still waits was made; `None` if none does.
        """
        if failure is not None:
            self._fail(now_s, failure)
            return
        # What was in short supply that long ago may be plenty: nobody has been let down since.
        if has_delivered or now_s - self._failed_at_s > _RESET_AFTER_S:
            self._is_out_of_stock = False
        waits = oldest_order_at_s is not None and oldest_order_at_s <= self._failed_at_s
        if not self._is_out_of_stock and not waits:
            self._is_in_episode = False

    def _fail(self, now_s: float, why: str) -> None:
        """Begins an episode, which backs off for twice as long as the one before, or goes on."""
        if not self._is_in_episode:
            is_old = now_s - self._failed_at_s > _RESET_AFTER_S
            doubled = self.rules.backoff_s if is_old else 2 * self._length_s
            self._length_s = min(max(doubled, self.rules.backoff_s), self.rules.max_backoff_s)
        self._is_in_episode = True
        self._is_out_of_stock = True
        self._failed_at_s = now_s
        self._until_s = now_s + self._length_s
        self.reason = why
