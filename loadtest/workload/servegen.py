"""Reads ServeGen's clients: each has a law of arrivals that changes every few minutes, over days.

Owns the format and the arrivals under such laws. Pure but for reading the files; chance comes in.
Source of the format: alibaba/ServeGen `f891d118`, arXiv 2505.09999.
"""

import csv
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loadtest.workload.traces import TraceError

# How long the last window lasts, with no later row to end it: as long as all do in the release.
_WINDOW_S = 600.0
_COLUMNS = ("start_s", "rate_per_s", "cv", "law", "shape", "scale")
_DRAWN_AT_ONCE = 1024


class GapLaw(StrEnum):
    """The law of the gaps between a client's requests."""

    GAMMA = "Gamma"
    WEIBULL = "Weibull"


@dataclass(frozen=True, slots=True)
class LawWindow:
    """The stretch of a client's time. `law` is `None` where it is idle, and the rate is 0 then.

    The mean gap is 1 / `rate_per_s`; `shape` is the law's. (The file's scale follows from both.)
    """

    start_s: float
    end_s: float
    rate_per_s: float
    law: GapLaw | None
    shape: float


@dataclass(frozen=True, slots=True)
class ClientLaw:
    """The law of one client: windows that follow each other from 0 on without a hole."""

    name: str
    windows: tuple[LawWindow, ...]

    @property
    def length_s(self) -> float:
        """Returns how long it is known for; after that it starts over."""
        return self.windows[-1].end_s

    def stretch(self, start_s: float, duration_s: float) -> tuple[LawWindow, ...]:
        """The windows of `duration_s` from `start_s` on, counted from there."""
        found = []
        turn_s = math.floor(start_s / self.length_s) * self.length_s
        while turn_s < start_s + duration_s:
            for window in self.windows:
                begin_s = max(turn_s + window.start_s - start_s, 0.0)
                end_s = min(turn_s + window.end_s - start_s, duration_s)
                if begin_s < end_s:
                    found.append(replace(window, start_s=begin_s, end_s=end_s))
            turn_s += self.length_s
        return tuple(found)


def read_clients(path: Path) -> tuple[ClientLaw, ...]:
    """The clients of a folder's CSV files by name, or the one of a file.

    Raises:
        TraceError: no file, or a row that is wrong.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: no CSV file in it; allowed: at least one client of ServeGen")
    return tuple(_read_client(file) for file in files)


def mean_rate_per_s(clients: tuple[ClientLaw, ...], start_s: float, duration_s: float) -> float:
    """Returns the requests per second of all clients over that stretch."""
    windows = [window for client in clients for window in client.stretch(start_s, duration_s)]
    return (
        sum(window.rate_per_s * (window.end_s - window.start_s) for window in windows) / duration_s
    )


def client_instants(
    windows: tuple[LawWindow, ...], factor: float, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Returns arrivals of one client at `factor` times its rate, in ascending order, in seconds.

    The rate is scaled and not the requests thinned: thinning would wash the burstiness out. Time
    runs as fast as the rate: a gap is drawn with mean 1 by the law of the window that it begins in,
    and what is left of it at the window's end is spent at the next window's rate.
    """
    instants = []
    left = 0.0  # of the gap that is running, in mean gaps
    is_running = False
    for window in windows:
        rate_per_s = window.rate_per_s * factor
        total = rate_per_s * (window.end_s - window.start_s)
        if window.law is None or total == 0:
            continue
        if not is_running:
            left = _rest(window, rng)
            is_running = True
        at = left
        while at < total:
            drawn = at + np.cumsum(_gaps(window, _DRAWN_AT_ONCE, rng))
            points = np.concatenate(([at], drawn[:-1]))
            instants.append(window.start_s + points[points < total] / rate_per_s)
            # The first that lies beyond the window; all of the draws if none does.
            beyond = int(np.searchsorted(drawn, total))
            at = float(drawn[min(beyond, _DRAWN_AT_ONCE - 1)])
        left = at - total
    return np.concatenate(instants) if instants else np.empty(0)


def _gaps(window: LawWindow, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draws gaps of mean 1."""
    if window.law is GapLaw.GAMMA:
        return rng.gamma(window.shape, 1 / window.shape, count)
    return rng.weibull(window.shape, count) / math.gamma(1 + 1 / window.shape)


def _rest(window: LawWindow, rng: np.random.Generator) -> float:
    """Returns what is left of the gap that is found at a random moment, in mean gaps.

    Long gaps are found more often: the gap has the law weighted with length, the moment is uniform.
    """
    if window.law is GapLaw.GAMMA:
        gap = rng.gamma(window.shape + 1, 1 / window.shape)
    else:
        exponent = 1 / window.shape
        gap = rng.gamma(1 + exponent) ** exponent / math.gamma(1 + exponent)
    return float(gap * rng.random())


def _read_client(path: Path) -> ClientLaw:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: it cannot be read: {error}") from error
    rows = [_row(path, number, row) for number, row in lines]
    if not rows:
        raise TraceError(f"{path}: no rows in it; allowed: at least one")
    first_s = rows[0].start_s
    windows = []
    for (number, _), row, following in zip(lines, rows, [*rows[1:], None], strict=True):
        start_s = row.start_s - first_s
        end_s = start_s + _WINDOW_S if following is None else following.start_s - first_s
        if end_s <= start_s:
            raise TraceError(f"{path}, line {number}: start_s does not ascend after it")
        windows.append(replace(row, start_s=start_s, end_s=end_s))
    return ClientLaw(path.stem, tuple(windows))


def _row(path: Path, number: int, row: list[str]) -> LawWindow:
    if len(row) != len(_COLUMNS):
        raise TraceError(
            f"{path}, line {number}: {len(row)} columns; allowed: {', '.join(_COLUMNS)}"
        )
    fields = dict(zip(_COLUMNS, row, strict=True))

    def refuse(key: str, allowed: str) -> TraceError:
        return TraceError(f"{path}, line {number}: {key} is {fields[key]!r}; allowed: {allowed}")

    values = {}
    for key in ("start_s", "rate_per_s", "shape"):
        try:
            values[key] = float(fields[key])
        except ValueError:
            raise refuse(key, "a number, at least 0") from None
        if not math.isfinite(values[key]) or values[key] < 0:
            raise refuse(key, "a number, at least 0")
    start_s, rate_per_s, shape = values["start_s"], values["rate_per_s"], values["shape"]
    if rate_per_s == 0:
        return LawWindow(start_s, start_s, 0.0, None, 0.0)
    if fields["law"] not in list(GapLaw):
        raise refuse("law", ", ".join(GapLaw))
    if shape == 0:
        raise refuse("shape", "a number above 0")
    return LawWindow(start_s, start_s, rate_per_s, GapLaw(fields["law"]), shape)
