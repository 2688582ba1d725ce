"""Looks whether a host's chips are free for the next process, and waits until they are.

libtpu takes chips for one process. After its end the kernel takes seconds to close them, and one
that has not ended keeps them: "open(/dev/vfio/1): Device or resource busy" is then what the next
one ends with (tpu-inference's pull request 926, 2025-10-23, of two tests one after the other on
v6e-8). Owns the looking, by three signs. Does not own what is done when chips stay taken.

- A VFIO group is opened by one process at a time, so it is opened and closed again. It belongs to
  nobody then but to who asks.
- `/dev/accel*` may be opened by several: whoever has it open, as `/proc` tells of processes that
  may be looked at.
- libtpu's lock file, which is asked for its lock and never locked.
"""

import asyncio
import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Source: the message of JAX 0.10.2 that tells to remove it.
LOCK_FILE = Path("/tmp/libtpu_lockfile")
_ACCEL = re.compile(r"accel\d+")
_GROUP = re.compile(r"\d+")
_LOOK_EVERY_S = 0.25
# Linux's `struct flock` on 64 bits: type, whence, start, length, process.
_FLOCK = "hhqqi4x"

Open = Callable[[Path], int]


def chips_in_use(
    root: Path = Path("/"), lock_file: Path = LOCK_FILE, open_node: Open | None = None
) -> tuple[str, ...]:
    """Returns why chips are not free, a phrase each; empty if nothing keeps them.

    Below `root` lie `dev` and `proc`. `open_node` opens a device node to read and write, `None`: as
    the system does. What this user may not look at counts as free.
    """
    found = [*_busy_groups(root, open_node or _open), *_open_accels(root)]
    holder = lock_holder(lock_file)
    if holder is not None:
        found.append(f"libtpu's lock is held by {_process(root, holder)}")
    return tuple(found)


async def wait_chips_free(look: Callable[[], tuple[str, ...]], timeout_s: float) -> tuple[str, ...]:
    """Looks until nothing keeps the chips; returns what still does after `timeout_s`.

    At 0 it looks once.
    """
    give_up_s = time.monotonic() + timeout_s
    while True:
        found = await asyncio.to_thread(look)
        if not found or time.monotonic() >= give_up_s:
            return found
        await asyncio.sleep(_LOOK_EVERY_S)


def lock_holder(path: Path) -> int | None:
    """Returns the process that has the file locked; `None` for none, 0 for one that is not ours."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    finally:
        os.close(file)
    if kind == fcntl.F_UNLCK:
        return None
    return max(0, int(process))


def _busy_groups(root: Path, open_node: Open) -> Iterator[str]:
    for path in sorted((root / "dev/vfio").glob("*")):
        if _GROUP.fullmatch(path.name) is None:
            continue
        try:
            file = open_node(path)
        except OSError as error:
            if error.errno == errno.EBUSY:
                yield f"/dev/vfio/{path.name} is open in a process that has not let go of it"
        else:
            os.close(file)


def _open_accels(root: Path) -> Iterator[str]:
    nodes = {f"{path}" for path in (root / "dev").glob("accel*") if _ACCEL.fullmatch(path.name)}
    if not nodes:
        return
    for folder in sorted((root / "proc").glob("[0-9]*")):
        try:
            opened = {os.readlink(file) for file in (folder / "fd").iterdir()} & nodes
        except OSError:
            continue  # it has ended, or is another user's
        for node in sorted(opened):
            name = Path(node).name
            yield f"/dev/{name} is open in {_process(root, int(folder.name))}"


def _process(root: Path, process: int) -> str:
    if process == 0:
        return "a process of another container"
    try:
        name = (root / "proc" / f"{process}" / "comm").read_text().strip()
    except OSError:
        return f"process {process}"
    return f"process {process} ({name})"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
