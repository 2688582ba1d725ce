"""How pods of gateways and hosts of slices leave: the time they have, and the command in it."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from serving.domain.errors import ConfigError
from serving.domain.topology import slice_shape
from serving.slices.local.notes import END_WITHIN_VARIABLE

from .examples import in_memory, one, raw_values

Json = dict[str, Any]
SHAPE = slice_shape("v6e", "2x2")


def pod_of(group: str, **rollout: float) -> Json:
    """The rendered pod of a worker group."""
    raw = raw_values((SHAPE, "spot"))
    raw["applications"][0]["args"]["rollout"] = rollout
    return pod_in(raw, group)


def pod_in(raw: Json, group: str) -> Json:
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


def test_gateway_tells_ray_and_waits(tmp_path: Path) -> None:
    said = tmp_path / "said"
    for name, body in {
        "ray": f'echo ray >> {said}; [ "$(grep -c ray {said})" -gt 2 ]',
        "sleep": f'echo "sleep $1" >> {said}',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = before_end(pod_of("gateway"))
    done = subprocess.run(command, env={"PATH": path}, check=False, timeout=60)
    assert done.returncode == 0
    # It waits for a head that is away, and then for as long as it told it.
    expected = ["ray", "sleep 5", "ray", "sleep 5", "ray", "sleep 720"]
    assert said.read_text().splitlines() == expected


def test_host_that_nobody_holds_goes_at_once_and_leaves_its_end_in_a_note(tmp_path: Path) -> None:
    pod = pod_of("v6e-2x2-spot")
    given = {each["name"]: each["value"] for each in own_environment(pod)}
    # As in the image, where the environment's Python is the first on the path.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path} | given | {"SLICEWISE_RUN_DIR": f"{tmp_path}"}
    before_s = time.time()
    done = subprocess.run(before_end(pod), env=environment, check=False, timeout=60)
    assert done.returncode == 0
    (notice,) = json.loads((tmp_path / "notices" / "pod.json").read_text())["notices"]
    assert before_s + 15 <= notice["deadline_s"] <= time.time() + 15


def own_environment(pod: Json) -> list[Json]:
    entries: list[Json] = pod["containers"][0]["env"]
    return [each for each in entries if each["name"].startswith("SLICEWISE_")]


@pytest.mark.parametrize(
    ("market", "drain_notice_s", "spot_shutdown_s", "grace_s", "end_s"),
    [
        # A spot node's kubelet kills pods earlier than their own grace ends.
        ("spot", 15, 30, 45, 15),
        ("spot", 100, 30, 130, 15),
        # Where it gives 120 s, 15 are for GKE's own pods, and the others' grace is as long.
        ("spot", 15, 120, 105, 105),
        ("spot", 110, 120, 140, 110),
        # Other nodes are not shut down below their pods.
        ("on-demand", 40, 30, 70, 70),
        ("on-demand", 40, 120, 70, 70),
    ],
)
def test_end_of_a_host_is_the_earlier_of_its_pods_and_its_nodes(
    market: str, drain_notice_s: float, spot_shutdown_s: int, grace_s: int, end_s: int
) -> None:
    raw = raw_values((SHAPE, market), spot_shutdown_s=spot_shutdown_s)
    described = {"name": market, "market": market, "drain_notice_s": drain_notice_s}
    raw["applications"][0]["args"]["compute_classes"] = [described]
    pod = pod_in(raw, f"v6e-2x2-{market}")
    assert pod["terminationGracePeriodSeconds"] == grace_s
    (given,) = [each for each in pod["containers"][0]["env"] if each["name"] == END_WITHIN_VARIABLE]
    assert given["value"] == str(end_s)


def test_spot_shutdown_that_is_not_offered_is_refused() -> None:
    raw = raw_values((SHAPE, "spot"), spot_shutdown_s=60)
    with pytest.raises(ConfigError, match=r"30.*120"):
        in_memory(raw)


def test_token_of_a_hosts_pod_is_the_node_readers_alone() -> None:
    pod = pod_of("v6e-2x2-spot")
    assert pod["automountServiceAccountToken"] is False
    (reader,) = (each for each in pod["initContainers"] if each["name"] == "node-reader")
    assert reader["restartPolicy"] == "Always"
    has_token = [
        container["name"]
        for container in (*pod["containers"], *pod["initContainers"])
        if "node-reader-token" in [each["name"] for each in container.get("volumeMounts", ())]
    ]
    assert has_token == ["node-reader"]
    # Both see the folder under the name that each of them is told.
    for container in (pod["containers"][0], reader):
        told = {each["name"]: each.get("value") for each in container["env"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert told["SLICEWISE_RUN_DIR"] == mounts["run"]
