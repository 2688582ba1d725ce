"""Watches the platform's slices under load, by its `/fleet`, which other servers do not have."""

import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtest.records import FleetSample

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


@dataclass(slots=True)
class FleetWatch:
    """Samples the fleet. `latest` is the last answer, empty before there is one.

    `start_s` is the monotonic instant of the run's start; `write` takes each sample.
    """

    url: str
    api_key: str | None
    start_s: float
    write: Callable[[FleetSample], None]
    latest: Fleet = field(default_factory=dict)

    def sample(self) -> None:
        """Asks once; no answer is no sample."""
        fleet = read_fleet(self.url, self.api_key)
        if fleet is not None:
            self.latest = fleet
            self.write(fleet_sample(fleet, time.monotonic() - self.start_s))
