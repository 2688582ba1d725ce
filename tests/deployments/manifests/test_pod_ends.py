"""How pods of gateways and hosts of slices leave: the time they have, and the command in it."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serving.domain.topology import slice_shape

from .examples import in_memory, one, raw_values

Json = dict[str, Any]
SHAPE = slice_shape("v6e", "2x2")


def pod_of(group: str, **rollout: float) -> Json:
    """The rendered pod of a worker group."""
    raw = raw_values((SHAPE, "spot"))
    raw["applications"][0]["args"]["rollout"] = rollout
    cluster = one(in_memory(raw), "RayService").body["spec"]["rayClusterConfig"]
    (found,) = [each for each in cluster["workerGroupSpecs"] if each["groupName"] == group]
    spec: Json = found["template"]["spec"]
    return spec


def before_end(pod: Json) -> list[str]:
    command: list[str] = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    return command


def deadline_s(pod: Json) -> int:
    """What Ray is told: how long it has."""
    words = shlex.split(before_end(pod)[-1].replace(";", " "))
    return int(words[words.index("--deadline-remaining-seconds") + 1])


@pytest.mark.parametrize("drain_s", [10, 600, 1000.5, 3600])
def test_gateway_has_time_for_a_successor_and_then_for_its_answers(drain_s: float) -> None:
    pod = pod_of("gateway", gateway_drain_s=drain_s)
    assert deadline_s(pod) >= drain_s + 60
    # It does not tell Ray of an end after the pod's own.
    assert pod["terminationGracePeriodSeconds"] > deadline_s(pod)


@pytest.mark.parametrize(
    ("group", "num_failures", "expected"),
    [
        # A gateway waits for a head that is away, and then for as long as it told it.
        ("gateway", 2, ["ray", "sleep 5", "ray", "sleep 5", "ray", "sleep 720"]),
        # A host whose Ray node has ended has nothing to wait for.
        ("v6e-2x2-spot", 1, ["ray"]),
        ("v6e-2x2-spot", 0, ["ray", "sleep 25"]),
    ],
)
def test_command_tells_ray_and_waits(
    group: str, num_failures: int, expected: list[str], tmp_path: Path
) -> None:
    said = tmp_path / "said"
    for name, body in {
        "ray": f'echo ray >> {said}; [ "$(grep -c ray {said})" -gt {num_failures} ]',
        "sleep": f'echo "sleep $1" >> {said}',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(before_end(pod_of(group)), env={"PATH": path}, check=False, timeout=60)
    assert done.returncode == 0
    assert said.read_text().splitlines() == expected
