"""Keeps the daily table: reads gateways again and again and adds what came to the day's file.

Owns the folder: one Parquet file a day and `recorder.json`, the readings that the next increase is
counted from. One recorder a folder. Reading and time come from outside.
"""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path

from deployments.ledger.daily import (
    Amounts,
    LedgerReading,
    RowKey,
    Sums,
    TableFileError,
    add,
    latest_increase,
)
from deployments.ledger.parquet import DayTable, read_table, write_table

STATE_FILE = "recorder.json"
_DAY_S = 24 * 3600


class LedgerRecorder:
    """Keeps the table of one folder. It reads back from there what was recorded before."""

    def __init__(self, folder: Path) -> None:
        """Raises `TableFileError` when the folder's state cannot be read."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._last = _read_state(folder / STATE_FILE)

    def take(self, readings: Iterable[LedgerReading]) -> Path | None:
        """Adds what came since the last call. Returns the file; `None` if no increase is known.

        An interval belongs to the day in which it began.

        Raises:
            TableFileError: the day's file is not one of ours.
        """
        readings = list(readings)
        increase, from_s = latest_increase(self._last, readings)
        path: Path | None = None
        if from_s is not None:
            until_s = max(reading.at_s for reading in readings)
            path = self._add(increase, from_s, until_s)
        self._last = {reading.gateway_id: reading for reading in readings}
        _write_state(self._folder / STATE_FILE, readings)
        return path

    def _add(self, increase: Sums, from_s: float, until_s: float) -> Path:
        day = utc_day(from_s)
        path = self._folder / f"{day}.parquet"
        known = read_table(path)
        if known is None:
            table = DayTable(day, from_s, until_s, increase)
        else:
            sums = add(known.sums, increase)
            table = DayTable(day, min(known.from_s, from_s), max(known.until_s, until_s), sums)
        write_table(path, table)
        return path


def utc_day(at_s: float) -> datetime.date:
    """The day that a time is in."""
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).date()


def wait_s(now_s: float, every_s: float) -> float:
    """Returns how long until the next reading: the interval, or less where midnight comes first."""
    return min(every_s, _DAY_S - now_s % _DAY_S)


def _write_state(path: Path, readings: Iterable[LedgerReading]) -> None:
    state = [
        {
            "gateway_id": reading.gateway_id,
            "started_at_s": reading.started_at_s,
            "at_s": reading.at_s,
            "sums": [[*key, *amounts] for key, amounts in reading.sums.items()],
        }
        for reading in readings
    ]
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(state))
    draft.replace(path)


def _read_state(path: Path) -> dict[str, LedgerReading]:
    if not path.exists():
        return {}
    num_names = len(RowKey._fields)
    try:
        return {
            load["gateway_id"]: LedgerReading(
                load["gateway_id"],
                float(load["started_at_s"]),
                float(load["at_s"]),
                {RowKey(*row[:num_names]): Amounts(*row[num_names:]) for row in load["sums"]},
            )
            for load in json.loads(path.read_text())
        }
    except (ValueError, KeyError, TypeError) as error:
        raise TableFileError(f"{path} is no recorder's state: {error}") from error
