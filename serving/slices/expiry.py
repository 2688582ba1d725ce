"""The end of a host whose time is over: a flex-start VM has a maximum run duration.

The end stands in an annotation of the Kubernetes node, which a pod may not be allowed to read
(`node_notices` reads it). Every process on the host can read the start time of the host.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from serving.slices.notices import Notice, NoticeKind

# Set by simulated clusters, whose hosts all share one machine: seconds since the epoch.
STARTED_AT_VARIABLE = "SLICEWISE_HOST_STARTED_AT"
# A VM's run is counted from its creation. Not measured; the VM of a TPU host boots within minutes.
CREATION_TO_BOOT_S = 180.0
_STAT = Path("/proc/stat")


class BootTimeError(RuntimeError):
    """The host does not report its start time, so its end is not known."""


def started_at_s(environment: Mapping[str, str], stat: Path = _STAT) -> float:
    """Returns the earliest possible start of this host, in wall-clock seconds.

    Raises:
        BootTimeError: no source here has the start time.
    """
    given = environment.get(STARTED_AT_VARIABLE)
    if given is not None:
        return float(given)
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        boot_s = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, StopIteration, ValueError, IndexError) as error:
        raise BootTimeError(f"{stat} tells no boot time: {error!r}") from error
    return boot_s - CREATION_TO_BOOT_S


def expiry_notice(worker_id: int, started_s: float, max_run_duration_s: float) -> Notice:
    """Returns the notice that ends a host which started at `started_s`."""
    deadline_s = started_s + max_run_duration_s
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(deadline_s))
    reason = f"its run of {max_run_duration_s:g} s is over at {at} UTC"
    return Notice(NoticeKind.EXPIRY, worker_id, deadline_s, reason, "start of the host")
