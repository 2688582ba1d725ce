"""The fake runtime in the eyes of two readers that we did not write.

They ask port 8431 of loopback and nothing else, so they run in network and mount namespaces of
their own, with the fake and a PCI bus of four v6e chips. libtpu lies in a folder of its own: vLLM
would take this machine for a TPU host.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import LIBTPU, do_without

pytestmark = [pytest.mark.slow, pytest.mark.needs("unshare")]

ROOT = Path(__file__).parents[2]

# What unshare runs: loopback up, a PCI bus, the fake, and then the reader.
_INSIDE = """
import fcntl, os, socket, struct, subprocess, sys
fake_python, fake_program, pci, *reader = sys.argv[1:]
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 0x41))  # SIOCSIFFLAGS, IFF_UP
subprocess.run(["mount", "--bind", pci, "/sys/bus/pci/devices"], check=True)
fake = subprocess.Popen(
    [fake_python, fake_program, "--address", "[::]", "--port", "8431"], stdout=subprocess.PIPE)
fake.stdout.readline()
try:
    done = subprocess.run(reader, env={**os.environ, "TPU_SKIP_MDS_QUERY": "1"}, timeout=90)
finally:
    fake.kill()
sys.exit(done.returncode)
"""
_SDK = """
import sys
from libtpu.sdk import tpumonitoring
for name in sys.argv[1:]:
    print(name, *tpumonitoring.get_metric(name).data())
"""


_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--map-root-user")


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        do_without(f"namespaces are not permitted here: {done.stderr.strip()}")


def _read(tmp_path: Path, *reader: str) -> str:
    tree = tmp_path / "tree"
    for index in range(4):
        device = tree / f"0000:00:0{4 + index}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text("0x006f\n")
        (device / "subsystem_device").write_text("0x0000\n")
        group = tmp_path / "groups" / f"{index}"
        group.mkdir(parents=True)
        (device / "iommu_group").symlink_to(group)
    fake = ROOT / "tests" / "exporters" / "libtpu_fake.py"
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-c", _INSIDE, sys.executable, f"{fake}", f"{tree}", *reader],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{LIBTPU}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_tpu_info_cli_reads_the_fake(tmp_path: Path) -> None:
    shown = _read(tmp_path, f"{Path(sys.executable).with_name('tpu-info')}")
    assert shown.count("TPU v6e chip") == 4
    assert shown.count("18.00 GiB / 31.00 GiB") == 4
    assert shown.count("87.50%") == 4
    # 14 transfers: 2 below 2 ms, 8 below 4 ms; the median is interpolated between them.
    assert "3250.00 us" in shown


@pytest.mark.needs("libtpu")
def test_the_libtpu_sdk_reads_the_fake(tmp_path: Path) -> None:
    names = ("duty_cycle_pct", "hbm_capacity_usage", "hlo_queue_size", "idle_duration")
    lines = _read(tmp_path, sys.executable, "-c", _SDK, *names).splitlines()
    assert [line for line in lines if line.startswith(names)] == [
        "duty_cycle_pct 87.50 87.50 87.50 87.50",
        f"hbm_capacity_usage {' '.join(['19327352832'] * 4)}",
        "hlo_queue_size " + " ".join(f"{chip}-tensorcore: 3" for chip in range(4)),
        "idle_duration 0.50 0.50 0.50 0.50",
    ]
