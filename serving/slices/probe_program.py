"""The probe: checks the devices of one host, and with the other hosts the interconnect.

It is a program of its own (`python -m serving.slices.probe_program`), one process per host, run
before weights are loaded. Reads a `ProbeSpec` as one line of JSON from stdin; writes JSON lines to
stdout, a `StageLine` at each stage and one `ProbeReport` at the end. It ends with status 0 if it
wrote a report, whatever the result. No other module of slices imports JAX. The program ends when
the process that started it ends.

In a simulated cluster, and only there, the environment variable SLICEWISE_PROBE_FAULT makes a host
faulty: `wrong_matmul`, `hang`, `crash`, `missing_device` or `small_hbm`. On TPU it is refused.
"""

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from serving.slices.probe import (
    FAULT_VARIABLE,
    Check,
    CheckName,
    DeviceFailure,
    Platform,
    ProbeOutcome,
    ProbeReport,
    ProbeSpec,
    Stage,
    StageLine,
)

# All of it is exact: the factors are small integers that bfloat16 holds, in which a TPU multiplies
# float32, and no sum reaches 2 ** 24.
_MATMUL_SIZE = 512
# Floats that each device contributes to the all-reduce: 1 MiB, enough to use every link.
_ALL_REDUCE_FLOATS = 256 * 1024
# Only the supervisor's deadline counts.
_JOIN_TIMEOUT_S = 24 * 3600
_AXIS = "device"


class Fault(StrEnum):
    """The fault of a simulated host."""

    WRONG_MATMUL = "wrong_matmul"  # its first device computes one wrong number
    HANG = "hang"  # it stops before the all-reduce, so the other hosts wait in it
    CRASH = "crash"  # its process aborts before the all-reduce
    MISSING_DEVICE = "missing_device"  # it has one device fewer
    SMALL_HBM = "small_hbm"  # its devices report half the memory


class Probe:
    """The checks of one host, in order."""

    def __init__(self, spec: ProbeSpec, fault: Fault | None, say: Callable[[bytes], None]) -> None:
        self._spec = spec
        self._fault = fault
        self._say = say
        self._checks: list[Check] = []

    def run(self) -> bool:
        """Makes all checks and reports; returns whether the all-reduce had a result."""
        started_s = time.monotonic()
        self._enter(Stage.JOINING)
        self._join()
        self._enter(Stage.DEVICES)
        local, everywhere = jax.local_devices(), jax.devices()
        self._enter(Stage.LOCAL)
        self._check(CheckName.LOCAL_DEVICES, lambda: self._count_local(local))
        self._check(CheckName.GLOBAL_DEVICES, lambda: self._count_all(everywhere))
        self._check(CheckName.DEVICE_KIND, lambda: self._kinds(local))
        self._check(CheckName.HBM, lambda: self._memory(local))
        self._check(CheckName.MATMUL, lambda: self._multiply(local))
        self._misbehave()
        self._enter(Stage.ALL_REDUCE)
        has_completed = self._check(CheckName.ALL_REDUCE, lambda: self._reduce(everywhere))
        self._enter(Stage.DONE)
        kinds = tuple(sorted({device.device_kind for device in local}))
        wall_s = time.monotonic() - started_s
        report = ProbeReport(self._spec.process_id, kinds, tuple(self._checks), wall_s)
        self._say(msgspec.json.encode(report))
        return has_completed

    def _enter(self, stage: Stage) -> None:
        self._say(msgspec.json.encode(StageLine(stage)))

    def _join(self) -> None:
        spec = self._spec
        jax.config.update("jax_platforms", spec.platform)
        if spec.platform == Platform.CPU:
            is_short = self._fault == Fault.MISSING_DEVICE
            jax.config.update("jax_num_cpu_devices", spec.devices_per_host - int(is_short))
            if spec.num_hosts > 1:
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if spec.num_hosts == 1:
            return
        if spec.coordinator_address is None:
            jax.distributed.initialize(initialization_timeout=_JOIN_TIMEOUT_S)
        else:
            jax.distributed.initialize(
                spec.coordinator_address,
                spec.num_hosts,
                spec.process_id,
                initialization_timeout=_JOIN_TIMEOUT_S,
            )

    def _check(self, name: CheckName, make: Callable[[], Check]) -> bool:
        """Makes one check; one that raises has failed. Returns whether it had a result."""
        started_s = time.monotonic()
        has_completed = True
        try:
            check = make()
        except Exception as error:  # noqa: BLE001  JAX has no common class for what devices do
            has_completed = False
            check = Check(name, ProbeOutcome.FAILED, f"{type(error).__name__}: {error}"[:500])
        wall_s = round(time.monotonic() - started_s, 6)
        self._checks.append(msgspec.structs.replace(check, wall_s=wall_s))
        return has_completed

    def _count_local(self, local: Sequence[jax.Device]) -> Check:
        expected = self._spec.devices_per_host
        detail = f"{len(local)} devices on this host, expected {expected}"
        return Check(CheckName.LOCAL_DEVICES, _passed(len(local) == expected), detail)

    def _count_all(self, everywhere: Sequence[jax.Device]) -> Check:
        expected = self._spec.num_hosts * self._spec.devices_per_host
        detail = f"{len(everywhere)} devices on the slice, expected {expected}"
        for host in range(self._spec.num_hosts):
            count = sum(device.process_index == host for device in everywhere)
            if count != self._spec.devices_per_host:
                detail += f"; host {host} shows {count}"
        return Check(CheckName.GLOBAL_DEVICES, _passed(len(everywhere) == expected), detail)

    def _kinds(self, local: Sequence[jax.Device]) -> Check:
        expected = self._spec.device_kind
        if expected is None:
            return Check(CheckName.DEVICE_KIND, ProbeOutcome.NOT_CHECKED, "no kind was expected")
        wrong = [
            self._failure(device, f"is a {device.device_kind!r}")
            for device in local
            if device.device_kind != expected
        ]
        return _of_devices(CheckName.DEVICE_KIND, wrong, len(local), f"are {expected!r}")

    def _memory(self, local: Sequence[jax.Device]) -> Check:
        expected = self._spec.hbm_bytes_per_device
        if expected is None:
            return Check(CheckName.HBM, ProbeOutcome.NOT_CHECKED, "no size was expected")
        slack = expected * self._spec.hbm_tolerance_ratio
        wrong, num_silent = [], 0
        for device in local:
            limit = self._memory_limit(device)
            if limit is None:
                num_silent += 1
            elif abs(limit - expected) > slack:
                wrong.append(self._failure(device, f"has {limit} bytes, expected {expected}"))
        if num_silent and not wrong:
            detail = f"{num_silent} of {len(local)} devices do not say how much memory they have"
            return Check(CheckName.HBM, ProbeOutcome.NOT_CHECKED, detail)
        return _of_devices(CheckName.HBM, wrong, len(local), f"have about {expected} bytes")

    def _memory_limit(self, device: jax.Device) -> int | None:
        if self._fault == Fault.SMALL_HBM and self._spec.hbm_bytes_per_device is not None:
            return self._spec.hbm_bytes_per_device // 2
        statistics = device.memory_stats()
        return None if statistics is None else statistics.get("bytes_limit")

    def _multiply(self, local: Sequence[jax.Device]) -> Check:
        """Runs one matmul per device, all at once, and compares with the host's own answer."""
        rows, columns = np.indices((_MATMUL_SIZE, _MATMUL_SIZE))
        left = ((3 * rows + 5 * columns) % 17 - 8).astype(np.float32)
        right = ((7 * rows + 11 * columns) % 13 - 6).astype(np.float32)
        answer = left.astype(np.float64) @ right.astype(np.float64)
        everyone = PartitionSpec()
        multiply = jax.jit(
            jax.shard_map(
                lambda one, other: (one @ other)[None],
                mesh=Mesh(np.array(local), (_AXIS,)),
                in_specs=(everyone, everyone),
                out_specs=PartitionSpec(_AXIS),
            )
        )
        wrong = []
        for shard in multiply(left, right).addressable_shards:
            product = np.array(shard.data[0])
            if self._fault == Fault.WRONG_MATMUL and shard.device == local[0]:
                product[0, 0] += 1
            num_wrong = int(np.count_nonzero(product != answer))
            if num_wrong:
                detail = f"computed {num_wrong} of {answer.size} numbers wrong"
                wrong.append(self._failure(shard.device, detail))
        return _of_devices(CheckName.MATMUL, wrong, len(local), "multiply exactly")

    def _reduce(self, everywhere: Sequence[jax.Device]) -> Check:
        """Sums over the slice; each device fills its own row, so a wrong device shows."""
        num_rows = len(everywhere)
        width = max(8, _ALL_REDUCE_FLOATS // num_rows)

        def contribute_and_sum() -> jax.Array:
            row = jax.lax.broadcasted_iota(jnp.int32, (num_rows, width), 0)
            column = jax.lax.broadcasted_iota(jnp.int32, (num_rows, width), 1)
            mine = row == jax.lax.axis_index(_AXIS)
            filled = jnp.where(mine, row + 1 + column % 251, 0).astype(jnp.float32)
            total: jax.Array = jax.lax.psum(filled, _AXIS)
            return total

        totals = jax.jit(
            jax.shard_map(
                contribute_and_sum,
                mesh=Mesh(np.array(everywhere), (_AXIS,)),
                in_specs=(),
                out_specs=PartitionSpec(),
            )
        )()
        answer = 1 + np.arange(num_rows)[:, None] + np.arange(width)[None] % 251
        seen = [np.asarray(shard.data) for shard in totals.addressable_shards]
        wrong = [
            self._failure(everywhere[row], "its part of the sum is wrong", is_anyones=True)
            for row in range(num_rows)
            if any((each[row] != answer[row]).any() for each in seen)
        ]
        return _of_devices(CheckName.ALL_REDUCE, wrong, num_rows, "add up")

    def _misbehave(self) -> None:
        if self._fault == Fault.CRASH:
            os.abort()
        if self._fault == Fault.HANG:
            threading.Event().wait()

    def _failure(
        self, device: jax.Device, detail: str, *, is_anyones: bool = False
    ) -> DeviceFailure:
        worker_id = device.process_index if is_anyones else self._spec.process_id
        return DeviceFailure(device.id, worker_id, detail)


def _passed(condition: bool) -> ProbeOutcome:  # noqa: FBT001  the condition is what it is about
    return ProbeOutcome.PASSED if condition else ProbeOutcome.FAILED


def _of_devices(
    name: CheckName, wrong: list[DeviceFailure], num_devices: int, praise: str
) -> Check:
    if not wrong:
        return Check(name, ProbeOutcome.PASSED, f"{num_devices} devices {praise}")
    first = wrong[0]
    detail = f"{len(wrong)} of {num_devices} devices failed; device {first.device_id} of host "
    detail += f"{first.worker_id}: {first.detail}"
    return Check(name, ProbeOutcome.FAILED, detail, failures=tuple(wrong))


def _read_fault(platform: Platform) -> Fault | None:
    asked = os.environ.get(FAULT_VARIABLE)
    if not asked:
        return None
    if platform == Platform.TPU:
        sys.exit(f"{FAULT_VARIABLE} is for simulated clusters; this is a TPU")
    try:
        return Fault(asked)
    except ValueError:
        sys.exit(f"{FAULT_VARIABLE}={asked!r}; allowed: {', '.join(Fault)}")


def _end_with(pid: int) -> None:
    """Ends this process when that one ends, even while a device hangs."""
    poller = select.poll()
    poller.register(os.pidfd_open(pid), select.POLLIN)

    def wait() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-supervisor", daemon=True).start()


def main() -> None:
    """Probes this host as stdin requests, and reports to stdout."""
    _end_with(os.getppid())
    report_fd = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no part of the report
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProbeSpec)
    fault = _read_fault(spec.platform)
    # The hosts talk to each other directly; JAX warns that a proxy may make them hang.
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    probe = Probe(spec, fault, lambda line: _write_line(report_fd, line))
    if not probe.run():
        # JAX's shutdown waits for all hosts, and the others will not reach it either.
        os._exit(0)
    if spec.num_hosts > 1:
        jax.distributed.shutdown()


def _write_line(fd: int, line: bytes) -> None:
    data = memoryview(line + b"\n")
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
