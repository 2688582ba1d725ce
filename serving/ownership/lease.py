"""The lease of an engine: which replica commands it, and how long it lives without one.

An engine has one owner at a time. Every claim has a higher number than the one before, and what an
earlier owner says counts no more: two replicas never own one engine, whatever they believe. An
engine that nobody owns goes on serving, until somebody claims it or its time is up. Pure: callers
pass `now_s`, on one monotonic clock.
"""

from dataclasses import dataclass


class ClaimRefusedError(RuntimeError):
    """The engine has an owner that is there, or ends. Take a slice as anybody else does."""


@dataclass(slots=True)
class EngineLease:
    """The lease of one engine. It begins owned, by the replica that started the engine.

    `number` is that of the present or last owner's claim. `ends_at_s` is when the engine ends
    unless somebody claims it; `None` while its owner is there.
    """

    owner: str
    lease_s: float
    number: int = 1
    is_owner_there: bool = True
    ends_at_s: float | None = None
    is_over: bool = False

    def claim(self, owner: str) -> int:
        """Makes `owner` the owner and returns the number of its claim.

        Raises:
            ClaimRefusedError: another owner is there, or the engine ends.
        """
        if self.is_over:
            raise ClaimRefusedError("the engine ends")
        if self.is_owner_there and owner != self.owner:
            raise ClaimRefusedError(f"{self.owner} has it")
        self.owner = owner
        self.number += 1
        self.is_owner_there = True
        self.ends_at_s = None
        return self.number

    def is_current(self, number: int) -> bool:
        """Returns whether this is the number of the present owner's claim."""
        return number == self.number and self.is_owner_there

    def leave(self, number: int, now_s: float, within_s: float | None = None) -> None:
        """Notes that the owner is not there any more; nothing if it has a successor already.

        `within_s` is how long another one has to come, `None` for the whole lease.
        """
        if self.is_current(number):
            self.is_owner_there = False
            self.ends_at_s = now_s + (self.lease_s if within_s is None else within_s)

    def is_run_out(self, now_s: float) -> bool:
        """Returns whether nobody has claimed the engine in time."""
        return self.ends_at_s is not None and now_s >= self.ends_at_s

    def end(self) -> None:
        """Refuses every claim from now on."""
        self.is_over = True
