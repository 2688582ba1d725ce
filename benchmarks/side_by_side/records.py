"""The raw records of a run: one line a pair, written as soon as it is measured.

The first line says of what code and which work the rest is; a run that was broken off goes on
behind its last pair, and only with the same code and work. A line without its end was being written
when the run was broken off, and is not there.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.side_by_side.errors import RecordsDifferError
from benchmarks.side_by_side.loads import Comparison
from benchmarks.side_by_side.reading import Reading

_SUMMARY_CHARACTERS = 200


class Head(msgspec.Struct, frozen=True, tag="run"):
    """What has to be known to read the pairs.

    `code` is a digest of the files that are measured, and is the same for all pairs. `commit` is
    where the run began; a pair names its own, which may differ in pages and tests.
    """

    code: str
    commit: str
    settings: tuple[Comparison, ...]
    versions: dict[str, str]
    command: str
    machine: str
    python: str


class Visit(msgspec.Struct, frozen=True):
    """One system, started, put under all loads and ended."""

    system: str
    start_s: float
    readings: tuple[Reading, ...]


class Pair(msgspec.Struct, frozen=True, tag="pair"):
    """Two systems, one after the other. `at` is when it was over, in UTC; `first` went first.

    Pairs of one turn that compare the same system of ours may have one visit to it between them.
    """

    comparison: str
    turn: int
    at: str
    commit: str
    first: str
    ours: Visit
    theirs: Visit


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """A system that could not be had when its turn came, and why."""

    comparison: str
    turn: int
    at: str
    system: str
    reason: str

    @property
    def summary(self) -> str:
        """The system and the beginning of the reason, on one line."""
        return f"{self.system}: {' '.join(self.reason.split())[:_SUMMARY_CHARACTERS]}"


Line = Head | Pair | Missing


class Records:
    """The records in one file."""

    def __init__(self, path: Path, head: Head, entries: Iterable[Pair | Missing] = ()) -> None:
        self._path = path
        self.head = head
        self.commit = head.commit  # what is measured from now on
        self._entries = list(entries)

    @classmethod
    def open(cls, path: Path, head: Head) -> "Records":
        """Opens the file to go on with it; a new one begins with `head`.

        Raises:
            RecordsDifferError: it is of other code or of other work than `head`.
        """
        if not path.exists():
            path.write_bytes(msgspec.json.encode(head) + b"\n")
            return cls(path, head)
        records = cls.read(path)
        records.commit = head.commit
        for what in ("code", "settings", "versions", "machine", "python"):
            if getattr(records.head, what) != getattr(head, what):
                there, here = getattr(records.head, what), getattr(head, what)
                shown = "" if what == "settings" else f": {there} there, {here} here"
                raise RecordsDifferError(f"{path} is of other {what}{shown}")
        whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
        os.truncate(path, len(whole))
        return records

    @classmethod
    def read(cls, path: Path) -> "Records":
        """Reads the file.

        Raises:
            RecordsDifferError: it does not begin with a head, or has another one.
        """
        lines = path.read_bytes().split(b"\n")[:-1]
        decoded = [msgspec.json.decode(line, type=Line) for line in lines]
        entries = [line for line in decoded if not isinstance(line, Head)]
        if len(decoded) - len(entries) != 1 or not isinstance(decoded[0], Head):
            raise RecordsDifferError(f"{path} has to begin with the only line of a run")
        return cls(path, decoded[0], entries)

    def append(self, entry: Pair | Missing) -> None:
        """Adds a line, on disk when it returns."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._entries.append(entry)

    def pairs(self, comparison: str) -> list[Pair]:
        """The pairs of a comparison, in order."""
        found = [each for each in self._entries if isinstance(each, Pair)]
        return [each for each in found if each.comparison == comparison]

    def all_pairs(self) -> list[Pair]:
        """All pairs, in order."""
        return [each for each in self._entries if isinstance(each, Pair)]

    def has(self, comparison: str, turn: int) -> bool:
        """Whether that pair is there."""
        return any(each.turn == turn for each in self.pairs(comparison))

    def missing(self, comparison: str, num_pairs: int) -> Missing | None:
        """Why a comparison has not as many pairs: what was said last; `None` if it has."""
        if len(self.pairs(comparison)) >= num_pairs:
            return None
        found = [each for each in self._entries if isinstance(each, Missing)]
        return next((each for each in reversed(found) if each.comparison == comparison), None)
