"""The agent on one host of a held slice: it probes the host and watches for its end.

It is a Ray actor in the host's bundle of the slice's placement group. So it runs where the
engine's worker runs, and ends with the group. It holds no chip, since the engine's workers do. Its
notices travel over a connection of their own (`host_heartbeat`), because Ray reports a dead host
only after 12 to 15 s.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import ray

from serving.config.slice_spec import RUN_DIR_VARIABLE, SliceSpec, Work
from serving.link.tls import TlsRole, accepting_end
from serving.slices.expiry import BootTimeError, expiry_notice, started_at_s
from serving.slices.host_heartbeat.server import HostStreamServer
from serving.slices.local.agent_socket import AgentSocket
from serving.slices.local.notes import END_WITHIN_VARIABLE
from serving.slices.metadata_client import (
    HOST_VARIABLE,
    SPOT_NOTICE_S,
    MetadataClient,
    watch_notices,
)
from serving.slices.notices import Notice
from serving.slices.probe import (
    SIMULATED_VARIABLE,
    HostProbe,
    Platform,
    ProbeSpec,
    run_probe_on_host,
)
from serving.telemetry.process_log import log_as_actor
from serving.tpu.host.chip_use import LOCK_FILE, chips_in_use, wait_chips_free
from serving.tpu.host.judgement import faults_of
from serving.tpu.host.limits import read_host_limits
from serving.tpu.host.locked_memory import raise_locked_memory
from serving.tpu.host.tpu_logs import tpu_log_dir

logger = logging.getLogger(__name__)

# The value of `HOST_VARIABLE` on a machine that is no VM of Google's: there is nobody to ask.
NO_METADATA = "none"


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The node of an agent, the address of its stream, and what `HostRecord` has of its host."""

    worker_id: int
    node_id: str
    address: tuple[str, int]
    tpu_log_dir: str | None = None  # None: libtpu writes none
    ends_at_s: float | None = None


class HostAgent:
    """The async actor of one host; only its slice replica calls its methods."""

    def __init__(self, worker_id: int, spec: SliceSpec, secret: bytes) -> None:
        log_as_actor(spec.log_style)
        self._worker_id = worker_id
        self._spec = spec
        self._ip = "127.0.0.1" if spec.listens_on_loopback else ray.util.get_node_ip_address()
        self._tls = accepting_end(secret, spec.encryption, TlsRole.HOST_AGENT, self._ip)
        self._stream: HostStreamServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self._socket: AgentSocket | None = None
        self._starting: asyncio.Task[AgentReport] | None = None

    async def start(self) -> AgentReport:
        """Opens the stream and listens to the metadata server and to this host. Idempotent."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start-agent")
        return await asyncio.shield(self._starting)

    async def _start(self) -> AgentReport:
        self._stream = HostStreamServer(self._worker_id, self._tls)
        address = await self._stream.listen(self._ip)
        expiry = self._expiry()
        if expiry is not None:
            self._stream.announce(expiry)
        # A machine that is no VM has no metadata server; simulated hosts have one of their own.
        host = os.environ.get(HOST_VARIABLE)
        if host != NO_METADATA:
            work = watch_notices(
                MetadataClient(host),
                self._worker_id,
                self._stream,
                preemption_notice_s=preemption_notice_s(os.environ, self._spec.drain_notice_s),
            )
            self._watch = asyncio.create_task(work, name="watch-metadata")
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if run_dir is not None:
            await self._listen_here(Path(run_dir), self._stream)
            if self._spec.work is not None:
                announce_work(Path(run_dir), self._spec.work)
        node_id = ray.get_runtime_context().get_node_id()
        # A simulated host has no libtpu.
        is_simulated = SIMULATED_VARIABLE in os.environ
        log_dir = None if is_simulated else tpu_log_dir(self._spec.engine_env, os.environ)
        ends_at_s = None if expiry is None else expiry.deadline_s
        return AgentReport(self._worker_id, node_id, address, log_dir, ends_at_s)

    async def _listen_here(self, run_dir: Path, stream: HostStreamServer) -> None:
        """Hears what is told on this host; a folder that cannot be written costs these notices."""
        self._socket = AgentSocket(run_dir, self._worker_id, stream)
        try:
            await self._socket.listen()
        except OSError as error:
            logger.warning("nothing_heard_here run_dir=%s error=%r", run_dir, str(error))
        else:
            stream.on_left = self._socket.tell_left

    def _expiry(self) -> Notice | None:
        """Returns the notice of the end of the host's run; `None` if it has none, or unknown."""
        if self._spec.max_run_duration_s is None:
            return None
        try:
            started_s = started_at_s(os.environ)
        except BootTimeError as error:
            # Then its end comes like that of a host that dies.
            logger.warning("expiry_unknown worker_id=%d error=%r", self._worker_id, str(error))
            return None
        return expiry_notice(self._worker_id, started_s, self._spec.max_run_duration_s)

    async def free_port(self) -> tuple[str, int]:
        """Returns an address on this host for the probe's coordinator: free now, taken at once."""
        with socket.socket() as probe:
            probe.bind((self._ip, 0))
            return self._ip, int(probe.getsockname()[1])

    async def probe(self, spec: ProbeSpec, timeout_s: float) -> HostProbe:
        """Probes this host; never raises."""
        if SIMULATED_VARIABLE in os.environ:
            spec = msgspec.structs.replace(spec, platform=Platform.CPU)
            return await run_probe_on_host(spec, timeout_s)
        faults = self._inspect_host()
        found = await run_probe_on_host(spec, timeout_s)
        return msgspec.structs.replace(found, host_faults=faults)

    async def wait_chips_free(self, timeout_s: float) -> tuple[str, ...]:
        """Waits until no process has this host's chips; returns what still has after `timeout_s`.

        At 0 it looks once.
        """
        lock_file = LOCK_FILE
        run_dir = os.environ.get(RUN_DIR_VARIABLE)
        if SIMULATED_VARIABLE in os.environ and run_dir is not None:
            # Simulated hosts of one machine share its temporary files.
            lock_file = Path(run_dir) / LOCK_FILE.name
        return await wait_chips_free(lambda: chips_in_use(lock_file=lock_file), timeout_s)

    def _inspect_host(self) -> tuple[str, ...]:
        """Raises what limits it may, for the probe below it, and returns what is left wrong."""
        complaint = raise_locked_memory(os.environ)
        limits = read_host_limits(os.environ)
        faults = faults_of(limits, self._spec.shape.generation)
        logger.info(
            "host_limits worker_id=%d limits=%r raised=%r faults=%r",
            self._worker_id,
            limits,
            complaint or "as wanted",
            faults,
        )
        return faults


def preemption_notice_s(environment: Mapping[str, str], drain_notice_s: float) -> float:
    """Returns how long this host lasts after its preemption was announced, in seconds.

    A pod is told what it gets of its node's end (`END_WITHIN_VARIABLE`). Elsewhere it is what every
    spot VM gets, or the notice of the compute class where that is shorter.
    """
    given = environment.get(END_WITHIN_VARIABLE)
    return min(SPOT_NOTICE_S, drain_notice_s) if given is None else float(given)


def announce_work(run_dir: Path, work: Work) -> None:
    """Reports the owner of the host's chips to its TPU exporter while this process lives.

    The agent lives exactly as long as the slice is held. A folder that cannot be written costs the
    labels and nothing else.
    """
    # Here, because it takes gRPC with it, which an agent does without where nobody exports.
    from serving.exporters.host_sources import announce_host  # noqa: PLC0415

    try:
        announce_host(run_dir, work.model, work.deployment, work.replica)
    except OSError as error:
        logger.warning("work_not_announced run_dir=%s error=%r", run_dir, str(error))
