"""A beat: the version of a report and a count, by which a reader knows that its writer lives.

A report of thousands of slices is read only when its version has changed. Pure.
"""

from dataclasses import dataclass

# A writer beats this often; who has not seen another beat for so long takes its report for stale.
BEAT_S = 2.0
STALE_S = 15.0


@dataclass(frozen=True, slots=True)
class ReportBeat:
    """One beat. `version` is that of the report; `count` differs from one beat to the next."""

    version: str
    count: int

    def encode(self) -> bytes:
        """Returns the beat as it is stored."""
        return f"{self.count} {self.version}".encode()


def decode_beat(text: bytes) -> ReportBeat | None:
    """Returns the stored beat; `None` if it is none of this version's."""
    count, _, version = text.decode(errors="replace").partition(" ")
    return ReportBeat(version, int(count)) if count.isdecimal() else None


class BeatWatch:
    """What a reader knows of a writer. `now_s` is monotonic."""

    def __init__(self) -> None:
        self._last: ReportBeat | None = None
        self._changed_at_s = float("-inf")

    def see(self, beat: ReportBeat | None, now_s: float) -> None:
        """Takes in what was read; `None`: there is nothing."""
        if beat is not None and beat != self._last:
            self._last, self._changed_at_s = beat, now_s

    def silence_s(self, now_s: float) -> float:
        """Returns how long ago the last new beat was seen; infinite if none ever was."""
        return now_s - self._changed_at_s

    @property
    def version(self) -> str | None:
        """The version that the last beat named; `None` before the first."""
        return None if self._last is None else self._last.version
