"""Programs go to and from the hosts of a slice as tasks of a real Ray, one on each host."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import placement_group

from serving.artifacts.compile_cache.layout import BLOBS
from serving.artifacts.compile_cache.local_folder import LocalFolder
from serving.artifacts.object_store.address import open_store
from serving.config.slice_spec import SliceSpec
from serving.domain.topology import slice_shape
from serving.engine.spec import CompileCacheSpec, EngineSpec, Programs, TpuSpec
from serving.engine.tpu.compile_cache import HostFacts, with_programs
from serving.slices.compile_cache_sync import CompileCacheSync
from serving.slices.reservation import Reservation

pytestmark = [pytest.mark.process, pytest.mark.long]

NUM_HOSTS = 2


@pytest.fixture(scope="module")
def reservation() -> Iterator[Reservation]:
    """Two bundles of this machine, held as a reservation holds the hosts of a slice."""
    ray.init(num_cpus=NUM_HOSTS, include_dashboard=False, log_to_driver=False)
    try:
        group = placement_group([{"CPU": 1}] * NUM_HOSTS)
        ray.get(group.ready())
        hosts = [SimpleNamespace(worker_id=number) for number in range(NUM_HOSTS)]
        slices = (SimpleNamespace(hosts=hosts),)
        yield Reservation(slices, group)  # type: ignore[arg-type]
    finally:
        ray.shutdown()


def programs(folder: Path, local: str, store: str | None = None) -> Programs:
    cache = CompileCacheSpec(store or str(folder / "store"), str(folder / local), 20.0)
    spec = EngineSpec(
        "m",
        "org/m",
        "spot",
        slice=SliceSpec("spot", slice_shape("v6e", "2x4", 4)),
        tpu=TpuSpec(cache),
    )
    resolved = with_programs(spec, HostFacts("r", "c", {}, {})).programs
    assert resolved is not None
    return resolved


async def test_programs_of_one_life_come_to_the_next(
    reservation: Reservation, tmp_path: Path
) -> None:
    first = programs(tmp_path, "first")
    sync = CompileCacheSync(first, reservation, {}, "life-1")
    assert await sync.pull() == "0 compiled programs came to 2 of 2 hosts"
    data = zlib.compress(b"program" * 100)
    LocalFolder(Path(first.folder)).write("jit_a-1-cache", data)
    await sync.push()
    store = open_store(first.cache.store)
    assert len(store.list(BLOBS)) == 1
    assert sync.moved.pushed >= 1  # both hosts are this machine, and may push at once
    assert (sync.moved.pushed_bytes >= len(data), sync.moved.failures) == (True, 0)

    # Both hosts are one machine with one folder: what one brought the other may find there.
    second = programs(tmp_path, "second")
    sync = CompileCacheSync(second, reservation, {}, "life-2")
    await sync.pull()
    assert sync.moved.pulled >= 1
    assert LocalFolder(Path(second.folder)).sizes() == {"jit_a-1-cache": len(data)}

    # A damaged one is told, made good by whoever compiled it, and told no more.
    store.put(store.list(BLOBS)[0].name, b"")
    third = programs(tmp_path, "third")
    sync = CompileCacheSync(third, reservation, {}, "life-3")
    await sync.pull()
    assert (sync.moved.damaged, sync.moved.pulled) == (NUM_HOSTS, 0)
    LocalFolder(Path(third.folder)).write("jit_a-1-cache", data)
    await sync.push()
    assert sync.moved.rebuilt >= 1
    await sync.push()
    assert store.get(store.list(BLOBS)[0].name) == data


async def test_store_that_is_none_costs_a_failure_on_each_host_and_no_start(
    reservation: Reservation, tmp_path: Path
) -> None:
    sync = CompileCacheSync(programs(tmp_path, "x", "ftp://none"), reservation, {}, "life")
    await sync.pull()
    await sync.push()
    assert sync.moved.failures == 2 * NUM_HOSTS
