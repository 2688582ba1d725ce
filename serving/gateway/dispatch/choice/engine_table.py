"""What is known of all engines of one version, as columns: a choice looks at all of them at once.

A row is read anew when its engine has told something, or was given something.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.gateway.dispatch.known_room import Need
from serving.gateway.dispatch.requests import EngineConnection

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

# More tokens than any engine's cache has.
UNBOUNDED = 1 << 60


@dataclass(slots=True)
class EngineColumns:
    """One entry for each engine, in the order of `engine_ids`.

    `num_in_flight` sequences and `backlog_tokens`, prompts in line, are of all gateways where the
    engine's host tells them, else of this one. `kv_tokens` are left in its cache for what comes. An
    engine `has_place` that takes another request now, if not any, and `has_place_for_moved` if it
    takes one that was on an engine before; what is left of one that
    `is_kept` is for others; one that `has_full_line` has room again within a step or two, and one
    that `is_empty` has no sequence. It lately had to compute `computed_ratio` of prompts' tokens;
    of one that `is_known` it is known what it has cached. One that `is_leaving` drains, and its
    requests have to be gone. One that `is_late` stands still, as far as can be told;
    `has_late` is false if none does.
    """

    engine_ids: list[str]
    num_in_flight: Column
    num_dispatched: Column
    backlog_tokens: Column
    kv_tokens: Column
    computed_ratio: NDArray[np.float64]
    has_place: Mask
    has_place_for_moved: Mask
    is_empty: Mask
    is_kept: Mask
    has_full_line: Mask
    is_draining: Mask
    is_leaving: Mask
    is_known: Mask
    is_late: Mask
    has_late: bool = False

    @classmethod
    def of(cls, engine_ids: list[str], is_known: Iterable[bool]) -> "EngineColumns":
        """Returns columns of these engines, of which nothing else is read yet."""
        count = len(engine_ids)
        return cls(
            engine_ids,
            num_in_flight=np.zeros(count, np.int64),
            num_dispatched=np.zeros(count, np.int64),
            backlog_tokens=np.zeros(count, np.int64),
            kv_tokens=np.zeros(count, np.int64),
            computed_ratio=np.ones(count),
            has_place=np.zeros(count, np.bool_),
            has_place_for_moved=np.zeros(count, np.bool_),
            is_empty=np.zeros(count, np.bool_),
            is_kept=np.zeros(count, np.bool_),
            has_full_line=np.zeros(count, np.bool_),
            is_draining=np.zeros(count, np.bool_),
            is_leaving=np.zeros(count, np.bool_),
            is_known=np.fromiter(is_known, np.bool_, count),
            is_late=np.zeros(count, np.bool_),
        )

    def __len__(self) -> int:
        """The number of engines."""
        return len(self.engine_ids)


class EngineTable:
    """The columns of the engines that are connected."""

    def __init__(self) -> None:
        self._columns = EngineColumns.of([], ())
        # With whether its cache is known.
        self.engines: list[tuple[EngineConnection, bool]] = []
        self._read: list[int] = []  # which version of its engine each row is
        self._unbounded: list[int] = []  # rows of engines that are given everything
        self.rows: dict[str, int] = {}  # by engine id

    def add(self, connection: EngineConnection, *, is_known: bool) -> None:
        """Adds a row; of an engine that `is_known` it is known what it has cached."""
        self.remove(connection.engine_id)
        self.engines.append((connection, is_known))
        self._make_anew()

    def remove(self, engine_id: str) -> None:
        """Takes a row away; without effect if there is none."""
        row = self.rows.get(engine_id)
        if row is not None:
            del self.engines[row]
            self._make_anew()

    def columns(self, now_s: float) -> EngineColumns:
        """Returns the columns as they are now, of the event loop's time; valid until the next call.

        Whoever looks at them does not change them.
        """
        for row in self._unbounded:
            self._read_row(row, self.engines[row][0])
        versions = [connection.version for connection, _ in self.engines]
        if versions != self._read:
            for row, (version, read) in enumerate(zip(versions, self._read, strict=True)):
                if version != read:
                    self._read_row(row, self.engines[row][0])
            self._read = versions
        columns = self._columns
        if any_of(columns.is_draining):
            for row, (connection, _) in enumerate(self.engines):
                by_s = connection.migrate_by_s
                columns.is_leaving[row] = by_s is not None and now_s >= by_s
        if columns.has_late:
            for row, (connection, _) in enumerate(self.engines):
                until_s = connection.late_until_s
                columns.is_late[row] = until_s is not None and now_s < until_s
            columns.has_late = any_of(columns.is_late)
        return columns

    def _make_anew(self) -> None:
        ids = [connection.engine_id for connection, _ in self.engines]
        self._columns = EngineColumns.of(ids, (is_known for _, is_known in self.engines))
        self._read = [-1] * len(ids)
        self._unbounded = [row for row, (each, _) in enumerate(self.engines) if each.room is None]
        self.rows = {engine_id: row for row, engine_id in enumerate(ids)}

    def _read_row(self, row: int, connection: EngineConnection) -> None:
        columns, room = self._columns, connection.room
        columns.num_dispatched[row] = connection.num_dispatched
        columns.is_draining[row] = connection.is_draining
        if connection.late_until_s is not None:
            columns.has_late = True
        if room is None:
            columns.num_in_flight[row] = len(connection.requests)
            columns.kv_tokens[row] = UNBOUNDED
            columns.computed_ratio[row] = 1.0
            columns.has_place[row] = columns.has_place_for_moved[row] = True
            return
        columns.num_in_flight[row] = num_sequences = room.num_sequences
        columns.backlog_tokens[row] = room.backlog_tokens
        left = room.kv_tokens_left
        columns.kv_tokens[row] = UNBOUNDED if left is None else left
        columns.computed_ratio[row] = room.computed_ratio
        columns.has_place[row] = room.has_place
        columns.has_place_for_moved[row] = room.has_place_for_moved
        columns.is_empty[row] = num_sequences == 0
        columns.is_kept[row] = room.is_kept_free
        columns.has_full_line[row] = room.has_full_line


def uncached_tokens(
    columns: EngineColumns, rows: dict[str, int], need: Need, cached: dict[str, int] | None
) -> Column:
    """Returns how many of a request's tokens each engine has to compute.

    `cached` has what engines have of it, those that are known and have something; `None` if that
    cannot be known of this request.
    """
    if cached is None:
        return _by_ratio(columns, need)
    if any_of(~columns.is_known):
        uncached = _by_ratio(columns, need)
        uncached[columns.is_known] = max(1, need.num_tokens)
    else:
        uncached = np.full(len(columns), max(1, need.num_tokens))
    of_cached = np.fromiter(map(rows.__getitem__, cached), np.intp, len(cached))
    num_tokens = np.fromiter(cached.values(), np.int64, len(cached))
    uncached[of_cached] = np.maximum(1, need.num_tokens - num_tokens)
    return uncached


def _by_ratio(columns: EngineColumns, need: Need) -> Column:
    """Returns how many tokens each computes, if it is as it was of others lately."""
    return np.rint(need.num_tokens * columns.computed_ratio).astype(np.int64)


# Of so few entries `any` and `min` of an array take several times as long as what they do.


def any_of(mask: Mask) -> bool:
    """Returns whether any entry is true."""
    return 1 in mask.tobytes()


def least_of(column: Column) -> int:
    """Returns the least of some entries."""
    return int(column[column.argmin()])
