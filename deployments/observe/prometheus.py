"""Makes the configuration of Prometheus out of the shipped one, and its lists of targets.

Owns the form of both. Does not own processes, nor which targets there are. Pure.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# A scrape takes less than its interval.
_TIMEOUT_RATIO = 0.8


class TargetError(ValueError):
    """Reports an invalid address; the message names what is allowed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The changes that `make observe` makes to the shipped configuration.

    `rules` are the rule files, `targets` is the folder of the lists of targets. `key_file` holds
    the API key of the gateways, `None` where they need none. `interval_s` is how often all are
    scraped and alerts evaluated, `None` for the shipped intervals.
    """

    rules: tuple[Path, ...]
    targets: Path
    key_file: Path | None = None
    interval_s: float | None = None


def configure(shipped: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The configuration to start Prometheus with."""
    config = {**shipped, "rule_files": [str(path) for path in settings.rules]}
    if settings.interval_s is not None:
        interval_ms = round(1000 * settings.interval_s)
        config["global"] = {
            **shipped["global"],
            "scrape_interval": f"{interval_ms}ms",
            "scrape_timeout": f"{round(_TIMEOUT_RATIO * interval_ms)}ms",
            "evaluation_interval": f"{interval_ms}ms",
        }
    config["scrape_configs"] = [_job(job, settings) for job in shipped["scrape_configs"]]
    return config


def target_file(job: str) -> str:
    """The name of a job's list of targets within `Settings.targets`."""
    return f"{job}.json"


def gateway_targets(urls: Iterable[str]) -> str:
    """The list of the gateways at these addresses.

    Raises:
        TargetError: one is no address.
    """
    return json.dumps([_gateway(url) for url in urls])


def plain_targets(addresses: Sequence[str]) -> str:
    """The list of these `HOST:PORT`; empty if there are none.

    Raises:
        TargetError: one is no address.
    """
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or "/" in address:
            raise TargetError(f"not an address: {address!r}; allowed: such as 127.0.0.1:9450")
    return json.dumps([{"targets": list(addresses)}] if addresses else [])


def _gateway(url: str) -> dict[str, Any]:
    try:
        address = urlsplit(url)
        port = address.port
    except ValueError as error:
        raise TargetError(_not_a_gateway(url)) from error
    if address.scheme not in ("http", "https") or not address.hostname or address.username:
        raise TargetError(_not_a_gateway(url))
    default = {"http": 80, "https": 443}[address.scheme]
    host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
    labels = {
        "__scheme__": address.scheme,
        "__metrics_path__": f"{address.path.rstrip('/')}/metrics",
    }
    return {"targets": [f"{host}:{port or default}"], "labels": labels}


def _not_a_gateway(url: str) -> str:
    return f"not an address of a gateway: {url!r}; allowed: such as http://127.0.0.1:8000"


def _job(job: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    name = job["job_name"]
    (discovery,) = job["file_sd_configs"]
    files = [str(settings.targets / target_file(name))]
    changed = {**job, "file_sd_configs": [{**discovery, "files": files}]}
    if name == "gateway" and settings.key_file is not None:
        changed["authorization"] = {"credentials_file": str(settings.key_file)}
    return changed
