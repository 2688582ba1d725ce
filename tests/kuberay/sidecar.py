"""`slicewise provision` as the process it is in production, beside the head of an emulated cluster.

It speaks with the API server by token and CA, and with Ray's head as its client.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from control_plane.on_call import series
from prometheus_client.parser import text_string_to_metric_families
from ray._raylet import GcsClient

from serving.domain.supply.keys import SupplyKeys

from .cluster import EmulatedCluster
from .objects import RAYCLUSTER
from .replicas import until

APPLICATION = "slicewise"
# Importing Ray and joining the cluster.
_START_S = 60.0
_STOP_S = 20.0


class Sidecar:
    """The command with these options, started as often as a test likes."""

    def __init__(self, cluster: EmulatedCluster, *options: str) -> None:
        self._cluster = cluster
        self._options = options
        self._log = cluster.folder / "provisioner.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it. It looks at the cluster seconds later."""
        access = self._cluster.access
        command = [str(Path(sys.executable).with_name("slicewise")), "provision"]
        command += ["--ray-address", self._cluster.address, "--raycluster", RAYCLUSTER]
        command += ["--namespace", self._cluster.namespace, "--kubernetes-url", access.base_url]
        command += ["--token-file", str(access.token_file), "--ca-file", str(access.ca_file)]
        command += self._options
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ.copy(), stdout=log, stderr=subprocess.STDOUT
            )

    async def rounds(self, count: int) -> None:
        """It looks more often than this: every other look is a beat that the directory sees."""
        gcs = GcsClient(address=self._cluster.address)
        key = SupplyKeys(APPLICATION).pods_beat
        beats = set()

        def has_looked() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"it ended\n{self.log()}"
            beats.add(gcs.internal_kv_get(key))
            return len(beats) > count

        await until(has_looked, f"{count} looks\n{self.log()}", _START_S)

    def page(self) -> dict[str, float]:
        """What its page for Prometheus says, by name and labels; needs `--metrics-port`."""
        port = self._options[self._options.index("--metrics-port") + 1]
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=_START_S).text
        return {
            series(sample.name, **sample.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def kill(self) -> None:
        """Ends it without a word."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def terminate(self) -> int:
        """Ends it as Kubernetes does; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self._process.wait, _STOP_S)

    def log(self) -> str:
        """What it has printed, over all its lives."""
        return self._log.read_text(errors="replace")
