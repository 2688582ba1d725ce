"""Either wait of an engine can be had on both sides."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from benchmarks.side_by_side.systems import OUR_NAP, OUR_SPIN, VLLMS_NAP, VLLMS_SPIN
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE, HostProcess

pytestmark = pytest.mark.slow

PROGRAM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
print(SpinCondition.wait.__module__)
"""
OURS = "serving.engine.vllm.shm_backoff"
VLLMS = "vllm.distributed.device_communicators.shm_broadcast"


@pytest.mark.parametrize(
    ("wait", "is_below_host", "expected"),
    [
        (OUR_NAP, True, OURS),
        (VLLMS_SPIN, False, VLLMS),
        # Neither ships so. Each case imports vLLM.
        pytest.param(OUR_SPIN, True, VLLMS, marks=pytest.mark.long),
        pytest.param(VLLMS_NAP, False, OURS, marks=pytest.mark.long),
    ],
)
def test_engine_processes_wait_as_they_are_told(
    wait: Mapping[str, str], is_below_host: bool, expected: str
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != HOST_VARIABLE}
    host = {HOST_VARIABLE: str(HostProcess.own())} if is_below_host else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=inherited | host | dict(wait),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == expected
