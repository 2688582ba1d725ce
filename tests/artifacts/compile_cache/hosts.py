"""Hosts that pull, compile in a process of JAX's own, and push; stores that fail on command."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.artifacts.compile_cache.key import CacheKey, ProgramFacts, cache_key
from serving.artifacts.compile_cache.layout import KeyPlace
from serving.artifacts.compile_cache.local_folder import LocalFolder
from serving.artifacts.compile_cache.pull import pull
from serving.artifacts.compile_cache.push import Writer, push
from serving.artifacts.compile_cache.report import Damage, PullReport, PushReport
from serving.artifacts.object_store.store import ObjectStore, StoredObject, StoreError
from serving.domain.topology import slice_shape
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import engine_settings

BUDGET_S = 30.0
COMPILE_S = 60.0


def facts(**changes: object) -> ProgramFacts:
    given: dict[str, object] = {
        "source": "org/model",
        "revision": "r1",
        "config": "c1",
        "versions": {"jax": "0.10.2", "vllm": "0.32.0"},
        "generation": "v6e",
        "topology": "2x4",
        "chips_per_host": 8,
        "args": {"max_num_seqs": 256},
        "env": {},
    }
    return ProgramFacts(**(given | changes))  # type: ignore[arg-type]


KEY = cache_key(facts())


@dataclass
class Host:
    """One host: a folder of its own, and a store that it shares with others."""

    store: ObjectStore
    path: Path
    key: CacheKey = KEY
    budget_s: float = BUDGET_S
    damage: Sequence[Damage] = field(default_factory=tuple)

    @property
    def folder(self) -> LocalFolder:
        return LocalFolder(self.path)

    def pull(self) -> PullReport:
        place = KeyPlace(self.key.family, self.key.digest)
        report = pull(self.store, place, self.folder, self.budget_s, time.monotonic)
        self.damage = report.damage
        return report

    def push(self) -> PushReport:
        writer = Writer(self.path.name, time.time, time.monotonic)
        return push(self.store, self.key, self.folder, writer, self.budget_s, self.damage)

    async def compile(self, first: int, last: int) -> dict[str, int]:
        """Runs programs `first` to `last` in a new process; JAX's own count of what it did."""
        shape = slice_shape("v6e", "2x4", 8)
        settings = engine_settings(
            EngineRequirements("m", shape, compile_cache=str(self.path)), None
        )
        jax = {n: value for n, value in settings.environment.items() if n.startswith("JAX_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.artifacts.compile_cache.compile_programs",
            str(self.path),
            str(first),
            str(last),
            env=os.environ | jax | {"JAX_PLATFORMS": "cpu"},
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(COMPILE_S):
            output, _ = await process.communicate()
        assert process.returncode == 0
        counted: dict[str, int] = json.loads(output)
        return {name: counted.get(name, 0) for name in ("cache_hits", "cache_misses")}


class FailingStore:
    """A store around another one, of which chosen calls fail."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.fails: set[str] = set()

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise StoreError(f"{name} refused")

    def get(self, name: str) -> bytes:
        self._call("get")
        return self._store.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._call("put manifest" if "/manifests/" in name else "put")
        self._store.put(name, data)

    def head(self, name: str) -> StoredObject | None:
        self._call("head")
        return self._store.head(name)

    def list(self, folder: str) -> list[StoredObject]:
        self._call("list")
        return self._store.list(folder)

    def delete(self, name: str) -> None:
        self._call("delete")
        self._store.delete(name)
