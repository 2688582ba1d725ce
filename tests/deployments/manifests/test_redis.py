"""The rendered Redis, started by its own command where a redis-server is installed."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.domain.topology import slice_shape

from .examples import found, in_memory, one, raw_values

PASSWORD = "correct-horse"
DEADLINE_S = 10.0

Json = dict[str, Any]


def own_redis(**more: Any) -> Json:
    return raw_values(
        (slice_shape("v6e", "4x4"), "spot"), redis={"own": {"image": "redis:7.4", **more}}
    )


def test_cluster_with_its_own_redis_keeps_its_state_there() -> None:
    folder = in_memory(own_redis(storage_class="premium-rwo"))
    assert found(folder) == []
    options = one(folder, "RayCluster").body["spec"]["gcsFaultToleranceOptions"]
    service = one(folder, "Service", "llm-redis")
    port = service.body["spec"]["ports"][0]["port"]
    assert options["redisAddress"] == f"{service.name}.{service.namespace}.svc:{port}"
    reference = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    stateful = one(folder, "StatefulSet").body["spec"]
    (variable,) = stateful["template"]["spec"]["containers"][0]["env"]
    assert variable["valueFrom"]["secretKeyRef"] == reference
    (claim,) = stateful["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "premium-rwo"
    # Nobody but the head; the policy among our other pods does not select it.
    labels = stateful["template"]["metadata"]["labels"]
    selecting = [
        each
        for each in folder.of_kind("NetworkPolicy")
        if each.body["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    (policy,) = selecting
    (peer,) = policy.body["spec"]["ingress"][0]["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"


def test_cluster_with_the_address_of_one_makes_none() -> None:
    folder = in_memory(raw_values((slice_shape("v6e", "4x4"), "spot")))
    assert folder.of_kind("StatefulSet") == []
    assert "llm-redis" not in folder.names("ServiceAccount")


@pytest.mark.needs("redis-server")
def test_rendered_command_keeps_what_was_written_when_it_is_killed(tmp_path: Path) -> None:
    container = one(in_memory(own_redis()), "StatefulSet").body["spec"]["template"]["spec"][
        "containers"
    ][0]
    at = Here(container, tmp_path)
    with at.running() as first:
        assert not at.ping("wrong")
        assert at.cli("set", "placement-group", "mine") == "OK"
        first.kill()
        first.wait()
    with at.running():
        assert at.cli("get", "placement-group") == "mine"
    assert PASSWORD not in " ".join(at.arguments)


class Here:
    """The container's command with paths and port of this machine."""

    def __init__(self, container: Json, folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "etc").mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._words = {"/data": f"{folder}/data", "/etc/redis": f"{folder}/etc"}
        self._start = self._local(container["command"][-1])
        self._ping = self._local(container["readinessProbe"]["exec"]["command"][-1])
        self.arguments: list[str] = []

    def ping(self, password: str) -> bool:
        """Whether the pod's own probe finds it ready."""
        command = ["/bin/sh", "-c", self._ping]
        return subprocess.run(command, env=_environment(password), check=False).returncode == 0

    def cli(self, *words: str) -> str:
        answer = subprocess.run(
            ["redis-cli", "-p", str(self._port), *words],
            env=os.environ | {"REDISCLI_AUTH": PASSWORD},
            check=True,
            capture_output=True,
            text=True,
        )
        return answer.stdout.strip()

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The server, once its probe finds it ready."""
        child = subprocess.Popen(
            ["/bin/sh", "-c", self._start],
            env=_environment(PASSWORD),
            stdout=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + DEADLINE_S
            while not self.ping(PASSWORD):
                assert child.poll() is None
                assert time.monotonic() < until, "not ready in time"
            self.arguments = Path(f"/proc/{child.pid}/cmdline").read_text().split("\0")
            assert self.arguments[0].startswith("redis-server")
            yield child
        finally:
            child.kill()
            child.wait()

    def _local(self, command: str) -> str:
        for theirs, ours in self._words.items():
            command = command.replace(theirs, ours)
        local = command.replace(" 6379", f" {self._port}")
        assert local != command
        return local.replace("--port ", "--bind 127.0.0.1 --port ")


def _environment(password: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "REDIS_PASSWORD": password}
