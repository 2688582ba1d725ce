"""Reports what a pull and a push did. Values only."""

from dataclasses import dataclass
from enum import StrEnum


class TransferOutcome(StrEnum):
    """The ways a pull or a push ended. None of them stops an engine from starting."""

    DONE = "done"
    NOTHING = "nothing"  # the store has nothing for this key; or this host nothing new
    OUT_OF_TIME = "out_of_time"  # the budget ended first; what had come by then is used
    UNREACHABLE = "unreachable"  # the store did not answer, or refused


@dataclass(frozen=True, slots=True)
class Damage:
    """The record of one program that differs from its manifest. It is compiled and pushed again."""

    name: str
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class PullReport:
    """The report of one pull on one host. `seed` is the key it took programs from if it had none.

    The store has `num_known` programs. `num_present` of them were on this host already, and
    `num_fetched` came. `damage` lists those that could not be used. `num_dropped` files of this
    host were removed because they were not whole.
    """

    outcome: TransferOutcome
    reason: str
    duration_s: float
    num_known: int = 0
    num_present: int = 0
    num_fetched: int = 0
    num_bytes: int = 0
    num_dropped: int = 0
    damage: tuple[Damage, ...] = ()
    seed: str | None = None

    def __str__(self) -> str:
        damaged = ",".join(f"{each.name[:40]}:{each.reason}" for each in self.damage[:3])
        return (
            f"outcome={self.outcome} programs={self.num_fetched} bytes={self.num_bytes} "
            f"duration_ms={self.duration_s * 1000:.0f} known={self.num_known} "
            f"present={self.num_present} dropped={self.num_dropped} damaged={len(self.damage)} "
            f"seed={self.seed} damage={damaged!r} reason={self.reason!r}"
        )


@dataclass(frozen=True, slots=True)
class PushReport:
    """The report of one push from one host.

    Among `num_pushed` programs, `num_rebuilt` replace bytes that a pull had found damaged.
    `num_bytes` went to the store; programs whose bytes were there already cost none. `num_refused`
    files were not whole, and stay here.
    """

    outcome: TransferOutcome
    reason: str
    duration_s: float
    num_pushed: int = 0
    num_rebuilt: int = 0
    num_bytes: int = 0
    num_refused: int = 0

    def __str__(self) -> str:
        return (
            f"outcome={self.outcome} programs={self.num_pushed} bytes={self.num_bytes} "
            f"duration_ms={self.duration_s * 1000:.0f} rebuilt={self.num_rebuilt} "
            f"refused={self.num_refused} reason={self.reason!r}"
        )
