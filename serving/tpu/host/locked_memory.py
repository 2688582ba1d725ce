"""Asks the kernel for the locked memory that libtpu needs for DMA with the chips.

Called by each process that is about to open chips, or to start one that does. Owns the limit of the
process that calls it, and nothing else.
"""

import resource
from collections.abc import Mapping

# Set by the manifests: bytes, or `unlimited`. Without it a process asks for no limit.
MEMLOCK_VARIABLE = "SLICEWISE_MEMLOCK_BYTES"
UNLIMITED = "unlimited"


def raise_locked_memory(environment: Mapping[str, str]) -> str | None:
    """Raises this process's limit of locked memory as far as it may; `None`, or why not as wanted.

    Raises:
        ValueError: the variable is neither bytes nor `unlimited`. Correct it.
    """
    wanted = _wanted(environment.get(MEMLOCK_VARIABLE, UNLIMITED))
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if _covers(soft, wanted):
        return None
    if not _covers(hard, wanted):
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (wanted, wanted))
        except (ValueError, OSError) as error:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
            return f"{limit_text(hard)} of locked memory instead of {limit_text(wanted)}: {error}"
        return None
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (wanted, hard))
    return None


def limit_text(limit: int) -> str:
    """Returns a limit for a reader."""
    return UNLIMITED if limit == resource.RLIM_INFINITY else f"{limit / 1024**2:.0f} MiB"


def _wanted(text: str) -> int:
    if text == UNLIMITED:
        return resource.RLIM_INFINITY
    if not text.isdecimal() or int(text) == 0:
        message = f"{MEMLOCK_VARIABLE}: not a limit (value {text!r}); allowed: bytes or {UNLIMITED}"
        raise ValueError(message)
    return int(text)


def _covers(limit: int, wanted: int) -> bool:
    if limit == resource.RLIM_INFINITY:
        return True
    return wanted != resource.RLIM_INFINITY and limit >= wanted
