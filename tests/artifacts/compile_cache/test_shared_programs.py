"""JAX's own cache over a shared store: what one host compiled no other host compiles again.

Each host has a folder of its own and compiles in a process of its own; JAX's events count.
"""

import asyncio
from pathlib import Path

import pytest

from serving.artifacts.compile_cache.layout import BLOBS
from serving.artifacts.compile_cache.report import TransferOutcome
from serving.artifacts.object_store.address import open_store
from serving.artifacts.object_store.store import ObjectStore

from .hosts import Host

pytestmark = pytest.mark.process

NUM_PROGRAMS = 4
# JAX compiles one program of its own to make the programs' input.
NUM_ENTRIES = NUM_PROGRAMS + 1


def compiled(count: int, *, found: int = 0) -> dict[str, int]:
    return {"cache_hits": found, "cache_misses": count}


async def test_second_start_on_an_empty_host_compiles_nothing(tmp_path: Path) -> None:
    await _start_twice(open_store(str(tmp_path / "store")), tmp_path)


@pytest.mark.long
async def test_second_start_compiles_nothing_whatever_the_store(
    any_store: ObjectStore, tmp_path: Path
) -> None:
    await _start_twice(any_store, tmp_path)


async def _start_twice(store: ObjectStore, tmp_path: Path) -> None:
    first = Host(store, tmp_path / "first")
    assert first.pull().outcome == TransferOutcome.NOTHING
    assert await first.compile(0, NUM_PROGRAMS) == compiled(NUM_ENTRIES)
    assert first.push().num_pushed == NUM_ENTRIES

    second = Host(store, tmp_path / "second")
    pulled = second.pull()
    assert (pulled.outcome, pulled.num_fetched) == (TransferOutcome.DONE, NUM_ENTRIES)
    assert await second.compile(0, NUM_PROGRAMS) == compiled(0, found=NUM_ENTRIES)
    assert second.push().outcome == TransferOutcome.NOTHING


@pytest.mark.long
async def test_damaged_programs_are_found_compiled_and_pushed_again(
    any_store: ObjectStore, tmp_path: Path
) -> None:
    first = Host(any_store, tmp_path / "first")
    await first.compile(0, NUM_PROGRAMS)
    first.push()
    cut, flipped = [each.name for each in any_store.list(BLOBS)][:2]
    whole = any_store.get(cut)
    any_store.put(cut, whole[: len(whole) // 2])
    altered = bytearray(any_store.get(flipped))
    altered[len(altered) // 2] ^= 1
    any_store.put(flipped, bytes(altered))

    second = Host(any_store, tmp_path / "second")
    pulled = second.pull()
    assert pulled.num_fetched == NUM_ENTRIES - 2
    assert sorted(each.reason for each in pulled.damage) == ["altered", "truncated"]
    assert await second.compile(0, NUM_PROGRAMS) == compiled(2, found=NUM_ENTRIES - 2)
    pushed = second.push()
    assert (pushed.num_pushed, pushed.num_rebuilt) == (2, 2)

    third = Host(any_store, tmp_path / "third")
    assert third.pull().damage == ()
    assert await third.compile(0, NUM_PROGRAMS) == compiled(0, found=NUM_ENTRIES)


@pytest.mark.long
async def test_two_writers_at_once_leave_what_both_have(
    any_store: ObjectStore, tmp_path: Path
) -> None:
    hosts = [Host(any_store, tmp_path / "first"), Host(any_store, tmp_path / "second")]
    # Both have the middle ones.
    await asyncio.gather(hosts[0].compile(0, 3), hosts[1].compile(1, NUM_PROGRAMS))
    await asyncio.gather(*(asyncio.to_thread(host.push) for host in hosts))

    third = Host(any_store, tmp_path / "third")
    assert third.pull().num_known == NUM_ENTRIES
    assert await third.compile(0, NUM_PROGRAMS) == compiled(0, found=NUM_ENTRIES)
