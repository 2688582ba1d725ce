"""The exporter put together: collectors in order of preference, their threads, the server's life.

Owns the composition. Loaded only when the exporter runs.
"""

import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serving.exporters.capture import read_capture, write_capture
from serving.exporters.collector import Collector
from serving.exporters.compose import HostDescription
from serving.exporters.host_sources import (
    PciCollector,
    PluginCollector,
    PodCollector,
    WorkloadCollector,
)
from serving.exporters.identity import read_identity, runtime_targets
from serving.exporters.libtpu_service.client import LibtpuCollector
from serving.exporters.libtpu_service.sdk import SdkChild, SdkCollector, sdk_command
from serving.exporters.scrape import Exporter
from serving.exporters.server import ExporterServer


@dataclass(frozen=True, slots=True)
class ExporterOptions:
    """The sources to ask. `libtpu`: `None` takes the environment's services, an empty tuple none.

    `None` elsewhere leaves a source out; `expected_chips` of `None` leaves it to the topology.
    """

    libtpu: tuple[str, ...] | None = None
    device_plugin: str | None = None
    sdk_python: str | None = None
    run_dir: Path | None = None
    expected_chips: int | None = None
    budget_s: float = 2.0


class ExporterService:
    """The exporter of this host, and the thread that polls the SDK for it.

    Raises:
        ValueError: an address in the options, or a port in the environment, is none.
    """

    def __init__(self, options: ExporterOptions, environment: Mapping[str, str]) -> None:
        targets = options.libtpu
        if targets is None:
            targets = runtime_targets(environment)
        collectors: list[Collector] = [
            LibtpuCollector(checked_address(target)) for target in dict.fromkeys(targets)
        ]
        if options.device_plugin is not None:
            collectors.append(PluginCollector(checked_address(options.device_plugin)))
        self._sdk: SdkCollector | None = None
        if options.sdk_python is not None:
            self._sdk = SdkCollector(SdkChild(sdk_command(options.sdk_python)))
            collectors.append(self._sdk)
        collectors += [PciCollector(), PodCollector()]
        if options.run_dir is not None:
            collectors.append(WorkloadCollector(options.run_dir))
        facts = HostDescription(read_identity(environment), options.expected_chips)
        self.exporter = Exporter(collectors, facts, installed_version(), options.budget_s)

    def dump_raw(self, path: Path) -> int:
        """Writes a capture of now; returns how many collectors gave something.

        Raises:
            OSError: the file cannot be written.
        """
        if self._sdk is not None:
            self._sdk.poll()
        samples = self.exporter.collect()
        write_capture(path, samples, self.exporter.facts, installed_version())
        return sum(sample.raw is not None for sample in samples)

    def serve(self, server: ExporterServer) -> None:
        """Serves until the process gets a signal to end."""
        if self._sdk is not None:
            threading.Thread(target=self._sdk.run, name="sdk", daemon=True).start()
        serve_until_signal(server)
        if self._sdk is not None:
            self._sdk.close()


def replaying_exporter(path: Path, budget_s: float) -> Exporter:
    """Returns an exporter of the host in the capture.

    Raises:
        ConfigError: the file is no capture.
        OSError: it cannot be read.
    """
    capture = read_capture(path)
    return Exporter(capture.collectors(), capture.facts(), installed_version(), budget_s)


def serve_until_signal(server: ExporterServer) -> None:
    """Serves until SIGTERM or SIGINT."""
    has_ended = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: has_ended.set())
    thread = threading.Thread(target=server.serve_forever, name="serve", daemon=True)
    thread.start()
    has_ended.wait()
    server.shutdown()
    server.server_close()
    thread.join()


def checked_address(address: str) -> str:
    """Returns the address itself.

    Raises:
        ValueError: it is not `HOST:PORT`.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"not an address (value {address!r}); allowed is HOST:PORT")
    return address


def installed_version() -> str:
    """Returns the version of Slicewise; `unknown` in a tree that was never installed."""
    try:
        return version("slicewise")
    except PackageNotFoundError:
        return "unknown"
