"""What a TPU host lets a process do: read from trees of files, judged, and asked of the kernel."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serving.domain.topology import GIB, Generation
from serving.tpu.host.judgement import HostLevel, faults_of, judge_host
from serving.tpu.host.limits import DeviceNode, HostLimits, cache_folder, read_host_limits
from serving.tpu.host.locked_memory import limit_text, raise_locked_memory

# As `ls -l /dev/vfio` showed a pod on v6e (a comment on ray-project/ray#65105, 2026-07-30), and
# as Linux has the other files.
TREE = {
    "dev/vfio/0": "",
    "dev/vfio/1": "",
    "dev/vfio/vfio": "",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000004000\n",
    "sys/module/vfio_iommu_type1/parameters/dma_entry_limit": "65535\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/fs/cgroup/memory.max": f"{628 * GIB}\n",
}
SOUND = HostLimits(
    user=0,
    memlock_bytes=None,
    may_lock_any=True,
    devices=(DeviceNode("/dev/vfio/0", 0, 0, 0o666, is_open_to_us=True),),
    max_map_count=8_388_608,
    vfio_dma_entries=2_000_000,
    transparent_hugepages="always",
    cache_folder="/cache",
    cache_free_bytes=500 * GIB,
    memory_limit_bytes=628 * GIB,
    omp_threads="32",
)


def write_tree(root: Path, **changes: str) -> Path:
    for name, text in (TREE | changes).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.startswith("dev/"):
            path.chmod(0o666)
    return root


def test_tree_of_a_pod_is_read(tmp_path: Path) -> None:
    environment = {"HF_HOME": "/var/cache/hf", "OMP_NUM_THREADS": "32"}
    found = read_host_limits(environment, write_tree(tmp_path), user=1000, memlock=8 << 20)
    assert found.user == 1000
    assert (found.memlock_bytes, found.may_lock_any) == (8 << 20, True)
    # The container of VFIO itself is nobody's chip.
    assert [(node.path, node.mode) for node in found.devices] == [
        ("/dev/vfio/0", 0o666),
        ("/dev/vfio/1", 0o666),
    ]
    assert {node.user for node in found.devices} == {os.geteuid()}
    assert (found.max_map_count, found.vfio_dma_entries) == (65530, 65535)
    assert found.transparent_hugepages == "madvise"
    assert found.memory_limit_bytes == 628 * GIB
    assert (found.cache_folder, found.omp_threads) == ("/var/cache/hf", "32")
    assert found.cache_free_bytes is not None


def test_what_is_not_there_is_unknown_and_not_zero(tmp_path: Path) -> None:
    found = read_host_limits({}, tmp_path, memlock=resource.RLIM_INFINITY)
    assert found.memlock_bytes is None
    assert not found.may_lock_any
    unknown = (found.max_map_count, found.vfio_dma_entries, found.transparent_hugepages)
    assert (*unknown, found.memory_limit_bytes, found.omp_threads) == (None,) * 5
    assert found.devices == ()


def test_limits_of_both_kinds_of_cgroups_are_read(tmp_path: Path) -> None:
    first = "sys/fs/cgroup/memory/memory.limit_in_bytes"
    root = write_tree(tmp_path, **{first: f"{2**63 - 4096}\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert read_host_limits({}, root).memory_limit_bytes is None
    (root / first).write_text(f"{16 * GIB}\n")
    assert read_host_limits({}, root).memory_limit_bytes == 16 * GIB


def test_older_chips_have_other_device_nodes(tmp_path: Path) -> None:
    root = write_tree(tmp_path, **{"dev/accel0": "", "dev/accel_test": ""})
    assert "/dev/accel0" in [node.path for node in read_host_limits({}, root).devices]
    assert len(read_host_limits({}, root).devices) == 3


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HOME": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/huggingface"),
        ({"HOME": "/c"}, "/c/.cache/huggingface"),
    ],
)
def test_cache_is_where_hugging_face_puts_it(environment: dict[str, str], expected: str) -> None:
    assert cache_folder(environment) == expected


def test_sound_host_has_no_fault() -> None:
    assert faults_of(SOUND, Generation.TPU7X) == ()
    assert {each.level for each in judge_host(SOUND, Generation.TPU7X)} == {HostLevel.OK}


CLOSED = DeviceNode("/dev/vfio/0", 0, 0, 0o600, is_open_to_us=False)
BAD: dict[str, tuple[HostLimits, str]] = {
    "locked memory": (
        replace(SOUND, may_lock_any=False, memlock_bytes=8 << 20),
        "fail locked memory: 8 MiB; allowed: unlimited, or the capability IPC_LOCK; GKE: "
        "cluster.host.rights",
    ),
    "device": (
        replace(SOUND, user=1000, devices=(CLOSED,)),
        "fail /dev/vfio/0: 0600, owner 0:0; allowed: readable and writable for user 1000",
    ),
    "maps": (
        replace(SOUND, max_map_count=65530),
        "warn vm.max_map_count: 65530; allowed: at least 8388608 on tpu7x; GKE: cluster.host",
    ),
    "mappings": (
        replace(SOUND, vfio_dma_entries=65535),
        "warn vfio dma_entry_limit: 65535; allowed: at least 2000000 on tpu7x",
    ),
    "hugepages": (
        replace(SOUND, transparent_hugepages="madvise"),
        "warn transparent hugepages: madvise; allowed: always",
    ),
    "disk": (replace(SOUND, cache_free_bytes=GIB), "warn disk of /cache: 1 GiB free; allowed: 20"),
    "memory": (
        replace(SOUND, memory_limit_bytes=8 * GIB),
        "warn memory limit: 8 GiB; allowed: 16 GiB",
    ),
    "threads": (replace(SOUND, omp_threads="1"), "warn OMP_NUM_THREADS: 1; allowed: more than 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_fault_of_a_host_says_what_is_allowed_and_what_to_do(case: str) -> None:
    limits, words = BAD[case]
    (fault,) = faults_of(limits, Generation.TPU7X)
    assert fault.startswith(words)


def test_worst_fault_comes_first() -> None:
    limits = replace(SOUND, omp_threads="1", devices=(CLOSED,))
    assert [fault[:4] for fault in faults_of(limits, None)] == ["fail", "warn"]


def test_kernel_is_not_judged_where_the_generation_is_unknown_or_asks_nothing() -> None:
    plain = replace(SOUND, max_map_count=65530, vfio_dma_entries=65535)
    assert faults_of(plain, None) == ()
    assert faults_of(plain, Generation.V6E) == ()


def test_this_machine_is_read_as_it_is() -> None:
    found = read_host_limits(os.environ)
    assert found.user == os.geteuid()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert found.memlock_bytes == (None if limit == resource.RLIM_INFINITY else limit)
    assert found.max_map_count == int(Path("/proc/sys/vm/max_map_count").read_text())


# In a process of its own, for a limit once lowered is not for anybody to raise.
_RAISE = """
import json, resource, sys
from serving.tpu.host.locked_memory import raise_locked_memory
soft, hard = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
complaint = raise_locked_memory({"SLICEWISE_MEMLOCK_BYTES": sys.argv[2]})
print(json.dumps([complaint, resource.getrlimit(resource.RLIMIT_MEMLOCK)]))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        # As far as the hard limit goes nobody needs a right.
        ((4096, 1 << 20), "65536", [65536, 1 << 20]),
        ((65536, 1 << 20), "4096", [65536, 1 << 20]),
    ],
)
def test_limit_is_raised_as_far_as_it_may_and_never_lowered(
    before: tuple[int, int], wanted: str, after: list[int]
) -> None:
    command = [sys.executable, "-c", _RAISE, json.dumps(before), wanted]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == [None, after]


@pytest.mark.process
def test_limit_that_may_not_be_raised_is_raised_to_what_there_is_and_said() -> None:
    """As any user but root is in a container without rights."""
    # Once all is imported: another user may not read Python's own files.
    leave = "import os; os.geteuid() or (os.setgid(65534), os.setuid(65534))\n"
    before, marker, after = _RAISE.partition("soft, hard")
    program = f"{before}{leave}{marker}{after}"
    command = [sys.executable, "-c", program, json.dumps([4096, 65536]), "unlimited"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    complaint, limits = json.loads(done.stdout)
    assert limits == [65536, 65536]
    assert complaint.startswith("0 MiB of locked memory instead of unlimited: ")


@pytest.mark.parametrize("text", ["0", "many", "-1", ""])
def test_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: bytes or unlimited"):
        raise_locked_memory({"SLICEWISE_MEMLOCK_BYTES": text})


def test_limits_are_written_for_readers() -> None:
    assert limit_text(8 << 20) == "8 MiB"
    assert limit_text(resource.RLIM_INFINITY) == "unlimited"
