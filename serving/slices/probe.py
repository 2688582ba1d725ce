"""Runs the probe program on one host of a slice, and judges the results of all hosts together.

Owns the messages between the program and its supervisor, the deadline, and the verdict. Does not
own the checks themselves (`probe_program`), nor how the supervisor gets onto every host. Imports no
JAX: a chip that hangs a process must not hang the one that judges it.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

# Set in the environment of the hosts of a simulated cluster: JAX has CPU devices there, no chips.
SIMULATED_VARIABLE = "SLICEWISE_SIMULATED_HOST"
# What is wrong with such a host, for the probe to find.
FAULT_VARIABLE = "SLICEWISE_PROBE_FAULT"
PROGRAM = (sys.executable, "-m", "serving.slices.probe_program")
# How long a program that has reported may take to leave the slice's distributed runtime.
EXIT_GRACE_S = 10.0
# A report of 8 devices that all fail in every check has about 4 KiB.
_MAX_LINE_BYTES = 256 * 1024
_STDERR_TAIL_BYTES = 4 * 1024
# Bounds the wait for the pipes of a killed process, should something that escaped hold them.
_PIPE_TIMEOUT_S = 1.0
# Once one host is known to be at fault, how long the others may still take to report.
_REST_S = 2.0
# jaxlib 0.10.2 ends a host's process with this when host 0's, which coordinates, is gone.
_ABANDONED_WORDS = b"JAX distributed service detected fatal errors"


class Platform(StrEnum):
    """The platform that JAX runs on."""

    TPU = "tpu"
    CPU = "cpu"  # simulated: one process plays a host, with as many CPU devices


class Stage(StrEnum):
    """The stages of a program, in order."""

    STARTING = "starting"  # the process starts and imports JAX
    JOINING = "joining"  # the hosts find each other
    DEVICES = "devices"  # JAX opens the devices, on a slice of several hosts all at once
    LOCAL = "local"  # each host computes by itself
    ALL_REDUCE = "all_reduce"  # all hosts compute together
    DONE = "done"


# In these a host may wait for another one that is at fault.
_WAITING = frozenset({Stage.JOINING, Stage.DEVICES, Stage.ALL_REDUCE})


class ProbeOutcome(StrEnum):
    """The outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not_checked"  # nothing was learned; never to be read as passed


class CheckName(StrEnum):
    """The checks, in the order in which a program makes them."""

    LOCAL_DEVICES = "local_devices"
    GLOBAL_DEVICES = "global_devices"
    DEVICE_KIND = "device_kind"
    HBM = "hbm"
    MATMUL = "matmul"
    ALL_REDUCE = "all_reduce"


# A host that fails one of these is at fault itself.
_OWN = frozenset({CheckName.LOCAL_DEVICES, CheckName.DEVICE_KIND, CheckName.HBM, CheckName.MATMUL})


class ProbeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The expectation for one host. `process_id` is its worker id.

    On CPU `devices_per_host` devices are simulated. `coordinator_address` (`host:port`, on host 0)
    may be left out on TPU, where JAX finds it, and with one host. `None` for the bytes of memory
    per device or the kind of device means unknown, and the check is skipped.
    """

    platform: Platform
    num_hosts: Annotated[int, msgspec.Meta(ge=1)]
    process_id: Annotated[int, msgspec.Meta(ge=0)]
    devices_per_host: Annotated[int, msgspec.Meta(ge=1)]
    coordinator_address: str | None = None
    hbm_bytes_per_device: Annotated[int, msgspec.Meta(gt=0)] | None = None
    # libtpu keeps a share of the memory to itself: some 2 % of 16 GiB (expected, not measured).
    hbm_tolerance_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    device_kind: str | None = None

    def __post_init__(self) -> None:
        if self.process_id >= self.num_hosts:
            message = f"process_id={self.process_id} must be below num_hosts={self.num_hosts}"
            raise ValueError(message)
        if self.platform == Platform.CPU and self.num_hosts > 1 and not self.coordinator_address:
            raise ValueError("several hosts on CPU need a coordinator_address")


class DeviceFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The failure of one device, with JAX's id and the host that it belongs to."""

    device_id: int
    worker_id: int
    detail: str


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one check on one host. `detail` is a sentence for a reader."""

    name: CheckName
    outcome: ProbeOutcome
    detail: str
    wall_s: float = 0.0
    failures: tuple[DeviceFailure, ...] = ()


class StageLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="stage"):
    """The program has come to this stage."""

    stage: Stage


class ProbeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report"):
    """The final report of the program. `wall_s` counts from the start of its `main`."""

    process_id: int
    device_kinds: tuple[str, ...]
    checks: tuple[Check, ...]
    wall_s: float


class HostOutcome(StrEnum):
    """The outcome of the program on one host."""

    PASSED = "passed"
    CHECK_FAILED = "check_failed"
    CRASHED = "crashed"
    GARBAGE = "garbage"  # it wrote what no probe program writes
    HUNG = "hung"
    ABANDONED = "abandoned"  # JAX ended it because another host's program had ended
    CANCELLED = "cancelled"  # another host was found at fault before this one had a result
    LOST = "lost"  # unknown, because the host or its supervisor is gone


class HostProbe(msgspec.Struct, frozen=True):
    """The result of one host. `report` is `None` where the program did not send one."""

    worker_id: int
    outcome: HostOutcome
    stage: Stage
    reason: str
    wall_s: float = 0.0
    report: ProbeReport | None = None
    host_faults: tuple[str, ...] = ()  # of what the host lets a process do, the worst first

    @property
    def is_at_fault(self) -> bool:
        """True if this host failed by itself, regardless of the other hosts."""
        return _rank(self) == _OWN_FAULT

    def failed(self, name: CheckName) -> Check | None:
        """Returns the check of that name if it failed, otherwise `None`."""
        for check in self.report.checks if self.report is not None else ():
            if check.name == name and check.outcome == ProbeOutcome.FAILED:
                return check
        return None


class ProbeVerdict(msgspec.Struct, frozen=True):
    """The verdict on a slice: usable, or not because of the `failing` hosts."""

    failing: tuple[int, ...]
    reason: str

    @property
    def has_passed(self) -> bool:
        """True if every host passed."""
        return not self.failing


_DECODER = msgspec.json.Decoder(StageLine | ProbeReport)


async def run_probe_on_host(
    spec: ProbeSpec,
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> HostProbe:
    """Runs the program as a process of its own on this machine, for at most `timeout_s`.

    Every outcome is a `HostProbe`, never an exception. When this returns, or is cancelled, the
    process and its children are gone and the devices are free. `environment` is the whole
    environment of the process; `None` means this process's.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    try:
        process = await asyncio.create_subprocess_exec(
            *program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        reason = f"the probe could not be started: {error}"
        return HostProbe(spec.process_id, HostOutcome.CRASHED, Stage.STARTING, reason)
    output = _ProbeOutput(process)
    try:
        async with asyncio.timeout(timeout_s):
            await output.listen(msgspec.json.encode(spec))
    except TimeoutError:
        pass
    finally:
        await output.end()
    return output.result(spec, timeout_s, loop.time() - started_s)


class _ProbeOutput:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stage = Stage.STARTING
        self._report: ProbeReport | None = None
        self._garbage: str | None = None
        self._has_ended = False
        self._complaints = bytearray()
        self._complaint_reader = asyncio.create_task(self._read_complaints())

    async def listen(self, request: bytes) -> None:
        """Reads until the program ends or writes nonsense; after a report, a moment longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(request + b"\n")
            await self._process.stdin.drain()
            self._process.stdin.close()
        while self._report is None:
            try:
                line = await self._process.stdout.readline()
                if not line:
                    break
                said = _DECODER.decode(line)
            except ValueError as error:  # undecodable, or a line without end
                self._garbage = str(error)
                return
            if isinstance(said, StageLine):
                self._stage = said.stage
            else:
                self._report = said
        async with asyncio.timeout(None if self._report is None else EXIT_GRACE_S):
            await self._process.wait()

    async def end(self) -> None:
        """Ends the program, if it has not ended by itself, and everything below it."""
        self._has_ended = self._process.returncode is not None
        # A group outlives its first process, as long as something below that lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdout is not None
        # asyncio takes a process for ended only when its pipes are, which have to be read for that.
        rest = {
            asyncio.create_task(self._process.stdout.read()),
            asyncio.create_task(self._process.wait()),
            self._complaint_reader,
        }
        _, stuck = await asyncio.wait(rest, timeout=_PIPE_TIMEOUT_S)
        for task in stuck:
            task.cancel()

    def result(self, spec: ProbeSpec, timeout_s: float, wall_s: float) -> HostProbe:
        outcome, reason = self._judge(timeout_s)
        return HostProbe(spec.process_id, outcome, self._stage, reason, wall_s, self._report)

    def _judge(self, timeout_s: float) -> tuple[HostOutcome, str]:
        if self._report is not None:
            failed = [each for each in self._report.checks if each.outcome == ProbeOutcome.FAILED]
            if failed:
                words = "; ".join(f"{each.name}: {each.detail}" for each in failed)
                return HostOutcome.CHECK_FAILED, words
            return HostOutcome.PASSED, "passed"
        if self._garbage is not None:
            return HostOutcome.GARBAGE, f"the probe said what cannot be read: {self._garbage}"
        if not self._has_ended:
            return HostOutcome.HUNG, f"no result within {timeout_s:g} s, at stage {self._stage}"
        code = self._process.returncode or 0
        ended = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        reason = f"the probe ended {ended} at stage {self._stage}: {self._last_line()}"
        if _ABANDONED_WORDS in self._complaints:
            return HostOutcome.ABANDONED, reason
        return HostOutcome.CRASHED, reason

    def _last_line(self) -> str:
        """Returns the fatal line of XLA's log, above its stack trace, or else the last line."""
        lines = self._complaints.decode(errors="replace").strip().splitlines()
        fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
        return (fatal or lines or ["it said nothing"])[-1].strip()[:500]

    async def _read_complaints(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(_STDERR_TAIL_BYTES):
            self._complaints += data
            del self._complaints[:-_STDERR_TAIL_BYTES]


async def probe_slice(runs: Mapping[int, Awaitable[HostProbe]]) -> ProbeVerdict:
    """Awaits the probes of a slice's hosts, by worker id, and returns the verdict.

    It returns as soon as one host is found at fault. The others may wait for that host until their
    deadline, so they are cancelled after a moment. A run's exception cancels all, and is raised.
    """
    tasks = {worker_id: asyncio.ensure_future(run) for worker_id, run in runs.items()}
    try:
        pending = set(tasks.values())
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result().is_at_fault for task in done):
                await asyncio.wait(pending, timeout=_REST_S) if pending else None
                break
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return verdict(
        (
            HostProbe(worker_id, HostOutcome.CANCELLED, Stage.STARTING, "another host is at fault")
            if task.cancelled()
            else task.result()
            for worker_id, task in tasks.items()
        ),
        len(tasks),
    )


def verdict(host_probes: Iterable[HostProbe], num_hosts: int) -> ProbeVerdict:
    """Judges the results of a slice's hosts together. Pure.

    Names the hosts at fault, not those that waited for them in vain. These are the hosts that
    failed by themselves or never reported; if there are none, those that crashed; else those that
    hung; else those with a wrong part of the all-reduce.
    """
    probes = {probe.worker_id: probe for probe in host_probes}
    for worker_id in range(num_hosts):
        missing = HostProbe(worker_id, HostOutcome.LOST, Stage.STARTING, "it never reported")
        probes.setdefault(worker_id, missing)
    bad = [probe for probe in probes.values() if probe.outcome != HostOutcome.PASSED]
    if not bad:
        reason = "every host passed" if num_hosts > 1 else "the host passed"
        return ProbeVerdict((), reason)
    least = min(_rank(probe) for probe in bad)
    failing = sorted(probe.worker_id for probe in bad if _rank(probe) == least)
    if least == _WRONG_SUM:
        failing = _wrong_in_the_sum(bad, num_hosts)
    first = probes[failing[0]]
    others = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
    return ProbeVerdict(tuple(failing), f"host {first.worker_id}{others}: {_describe(first, bad)}")


_OWN_FAULT, _CRASHED, _HUNG, _WRONG_SUM, _AFFECTED = range(5)


def _rank(probe: HostProbe) -> int:
    """Returns the rank of a host's blame; 0 is the most."""
    if probe.report is not None:
        if any(probe.failed(name) for name in _OWN):
            return _OWN_FAULT
        wrong = probe.failed(CheckName.ALL_REDUCE)
        return _WRONG_SUM if wrong is not None and wrong.failures else _AFFECTED
    match probe.outcome:
        case HostOutcome.LOST:
            return _OWN_FAULT
        case HostOutcome.CANCELLED:
            return _AFFECTED
        case HostOutcome.ABANDONED:
            # Host 0 hung like this one, and was ended a moment earlier.
            return _HUNG
    if probe.stage not in _WAITING:
        return _OWN_FAULT
    return _HUNG if probe.outcome == HostOutcome.HUNG else _CRASHED


def _wrong_in_the_sum(bad: Iterable[HostProbe], num_hosts: int) -> list[int]:
    """Returns the hosts with a wrong contribution; if all are wrong, those that saw it so."""
    saw = [probe for probe in bad if _rank(probe) == _WRONG_SUM]
    checks = [probe.failed(CheckName.ALL_REDUCE) for probe in saw]
    sources = {each.worker_id for check in checks if check for each in check.failures}
    if len(sources) < num_hosts:
        return sorted(sources)
    return sorted(probe.worker_id for probe in saw)


def _describe(named: HostProbe, bad: Iterable[HostProbe]) -> str:
    if named.outcome != HostOutcome.PASSED:
        # What a host forbids shows as some error of libtpu's; the cause stands beside it.
        return "; ".join([named.reason, *(f"this host: {each}" for each in named.host_faults)])
    witness = min(bad, key=lambda probe: probe.worker_id)
    return f"as host {witness.worker_id} saw it, {witness.reason}"
