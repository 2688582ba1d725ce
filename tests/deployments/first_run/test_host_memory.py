"""Memory is what the container may use, where it may use less than the machine has."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deployments.first_run.hosts.memory import read_host_memory
from deployments.first_run.hosts.reach import PYTHON, ThisHost

MIB = 1024**2
TOTAL = psutil.virtual_memory().total


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "max\n"},
        # A limit of v1 that is none.
        {"memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {},
    ],
)
def test_without_a_limit_the_machine_counts(tmp_path: Path, files: dict[str, str]) -> None:
    found = read_host_memory(tree(tmp_path, files))
    assert found.limit_bytes == TOTAL
    assert 0 < found.free_bytes <= TOTAL


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": f"{64 * MIB}\n",
            "memory.current": f"{40 * MIB}\n",
            "memory.stat": f"anon 1\ninactive_file {16 * MIB}\nactive_file 5\n",
        },
        {
            "memory/memory.limit_in_bytes": f"{64 * MIB}\n",
            "memory/memory.usage_in_bytes": f"{40 * MIB}\n",
            "memory/memory.stat": f"cache 1\ntotal_inactive_file {16 * MIB}\n",
        },
    ],
)
def test_limit_of_the_container_counts_without_what_it_uses(
    tmp_path: Path, files: dict[str, str]
) -> None:
    found = read_host_memory(tree(tmp_path, files))
    assert found.limit_bytes == 64 * MIB
    assert found.free_bytes == (64 - 40 + 16) * MIB


def test_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    found = read_host_memory(tree(tmp_path, {"memory.max": f"{4 * TOTAL}\n"}))
    assert found.limit_bytes == TOTAL


def test_container_that_uses_more_than_it_may_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": "10\n", "memory.current": "12\n", "memory.stat": "inactive_file 0\n"}
    assert read_host_memory(tree(tmp_path, files)).free_bytes == 0


@pytest.mark.process
def test_processes_of_an_application_tell_the_most_that_they_had(tmp_path: Path) -> None:
    """Which is more than what they have now."""
    program = "block = bytearray(300 * 2**20); del block; print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"RAY_TMPDIR": f"{tmp_path}/a1/sw"},
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        command = (PYTHON, "-m", "deployments.first_run.hosts.memory_here")
        (found,) = ThisHost().run((*command, f"{tmp_path}/a1/"), 60)
        told = found.last_json()
        assert told is not None, found
        assert told["processes"] == 1
        assert 300 * MIB < told["most_bytes"] < 400 * MIB
        assert psutil.Process(process.pid).memory_info().rss < 100 * MIB
        assert told["limit_bytes"] == read_host_memory().limit_bytes
        (other,) = ThisHost().run((*command, f"{tmp_path}/a2/"), 60)
        assert (other.last_json() or {})["processes"] == 0
    finally:
        process.kill()
        process.communicate()
