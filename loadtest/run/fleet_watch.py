"""Watches the platform's slices under load, as its `/fleet` reports them once a second.

Other servers have no `/fleet`; then there are no samples.
"""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from loadtest.records import FleetSample

_PERIOD_S = 1.0
_TIMEOUT_S = 5.0

# Any: JSON of another program, of which only what is needed is read.
Fleet = Mapping[str, Any]


def fleet_sample(fleet: Fleet, at_s: float) -> FleetSample:
    """Counts slices and chips by class and state. A slice without known chips has 0."""
    slices: dict[str, dict[str, dict[str, int]]] = {}
    for row in fleet["slices"]:
        by_state = slices.setdefault(row["compute_class"], {})
        counts = by_state.setdefault(row["state"], {"slices": 0, "chips": 0})
        counts["slices"] += 1
        counts["chips"] += row.get("num_chips") or 0
    return FleetSample(at_s, slices)


def read_fleet(url: str, api_key: str | None) -> Fleet | None:
    """Reads the platform's fleet; `None` if it does not answer or is no platform of ours."""
    headers = {"accept": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url.rstrip("/") + "/fleet", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            fleet = json.load(response)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    if not isinstance(fleet, dict) or not isinstance(fleet.get("slices"), list):
        return None
    return fleet


class FleetWatch:
    """Samples in a thread of its own from `start` to `stop`.

    `start_s` is the monotonic instant of the run's start; `write` takes each sample.
    """

    def __init__(
        self, url: str, api_key: str | None, start_s: float, write: Callable[[FleetSample], None]
    ) -> None:
        self._url = url
        self._api_key = api_key
        self._start_s = start_s
        self._write = write
        self._latest: Fleet = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)

    @property
    def latest(self) -> Fleet:
        """The last answer, empty before there is one."""
        return self._latest

    def start(self) -> None:
        """The first sample is taken at once."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the last sample is written."""
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            fleet = read_fleet(self._url, self._api_key)
            if fleet is not None:
                self._latest = fleet
                self._write(fleet_sample(fleet, time.monotonic() - self._start_s))
            if self._is_over.wait(_PERIOD_S):
                return
