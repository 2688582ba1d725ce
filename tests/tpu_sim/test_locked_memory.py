"""The worker of an engine asks for the locked memory that libtpu needs, before it opens chips.

On JAX CPU nothing is locked: what is looked at is the limit that its process has in the end.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serving.tpu.host.locked_memory import MEMLOCK_VARIABLE

from .engines import running_engine, simulation_environment
from .tiny_models import QWEN3, TinyModels

pytestmark = [
    pytest.mark.tpu_sim,
    pytest.mark.filterwarnings("default"),  # as in `test_parity`
]

LOW, WANTED = 1024**2, 2 * 1024**2


@pytest.fixture
def low_limit() -> Iterator[None]:
    """This process and what it starts may lock little, and may ask for more."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert before[1] == resource.RLIM_INFINITY or before[1] >= WANTED
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOW, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def limit_of(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_MEMLOCK)[0]


@pytest.mark.usefixtures("low_limit")
async def test_worker_raises_its_limit_and_nobody_elses(models: TinyModels, caches: Path) -> None:
    environment = simulation_environment(caches, 1) | {MEMLOCK_VARIABLE: f"{WANTED}"}
    async with running_engine(models.path(QWEN3), environment):
        started = psutil.Process().children(recursive=True)
        assert WANTED in {limit_of(each.pid) for each in started}
        assert limit_of(psutil.Process().pid) == LOW
