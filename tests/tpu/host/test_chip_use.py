"""Whether chips are free, by each of three signs, with real processes that hold and let go."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from serving.tpu.host.chip_use import chips_in_use, lock_holder, wait_chips_free
from tests.hosts.chip_holders import Held, holding


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host of four chips of one generation and four of another, which nobody has."""
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for name in ("vfio/0", "vfio/1", "vfio/vfio", "accel0", "accel1", "accel_sysfs"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc").symlink_to("/proc")
    return tmp_path


def in_use(host: Path, **options: object) -> tuple[str, ...]:
    return chips_in_use(host, host / "lock", **options)  # type: ignore[arg-type]


def test_host_that_nobody_uses_and_one_without_chips(host: Path, tmp_path: Path) -> None:
    assert in_use(host) == ()
    assert chips_in_use(tmp_path / "none", tmp_path / "no-lock") == ()


def test_lock_that_a_process_holds_is_seen_and_not_taken(host: Path) -> None:
    lock = host / "lock"
    lock.touch()
    assert lock_holder(lock) is None
    with holding(Held.LOCKED, lock) as process:
        assert lock_holder(lock) == process.pid
        (found,) = in_use(host)
        assert found.startswith(f"libtpu's lock is held by process {process.pid} (python")
    # It is free with the end of its process, though the file stays; and looking has not locked it.
    assert lock_holder(lock) is None
    with holding(Held.LOCKED, lock) as process:
        assert lock_holder(lock) == process.pid


def test_chip_that_a_process_has_open_is_named_with_it(host: Path) -> None:
    with holding(Held.OPEN, host / "dev/accel1") as process:
        (found,) = in_use(host)
        assert found.startswith(f"/dev/accel1 is open in process {process.pid} (python")
    assert in_use(host) == ()


def test_group_that_cannot_be_opened_is_busy_and_one_that_may_not_is_not_known(host: Path) -> None:
    opened: list[str] = []

    def open_node(path: Path) -> int:
        opened.append(path.name)
        if path.name == "1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        raise PermissionError(errno.EACCES, "Permission denied")

    assert in_use(host, open_node=open_node) == (
        "/dev/vfio/1 is open in a process that has not let go of it",
    )
    assert opened == ["0", "1"]


def test_looking_leaves_nothing_open(host: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert in_use(host) == ()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_wait_ends_when_the_chips_are_free_and_not_before(host: Path) -> None:
    (host / "lock").touch()
    with holding(Held.LOCKED, host / "lock") as process:
        assert len(await wait_chips_free(lambda: in_use(host), 0)) == 1
        waiting = asyncio.create_task(wait_chips_free(lambda: in_use(host), 60))
        done, _ = await asyncio.wait({waiting}, timeout=0.6)
        assert not done
        process.kill()
        assert await waiting == ()


async def test_wait_has_a_bound_and_says_what_is_left() -> None:
    looks: list[int] = []

    def look() -> tuple[str, ...]:
        looks.append(1)
        return ("a chip is taken",)

    assert await wait_chips_free(look, 0.3) == ("a chip is taken",)
    assert len(looks) > 1
