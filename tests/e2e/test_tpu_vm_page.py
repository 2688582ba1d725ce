"""The page on TPU VMs, followed word by word on simulated hosts: namespaces, and no chips.

The engine of the page's configuration is replaced by the paced one, since there is no TPU; all else
of the file stays, and every command is the page's own.
"""

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.simulation.hosts.namespaces import Host, Hosts, check_permitted
from serving.config.ray_settings import RAY_SETTINGS, RECONNECT
from serving.slices.metadata_client import HOST_VARIABLE
from serving.slices.probe import SIMULATED_VARIABLE
from tests.e2e.application import PROJECT_ROOT
from tests.hosts.http_calls import Call, HttpCalls
from tests.hosts.permission import skipped_where_refused
from tests.hosts.ray_nodes import node_environment

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = PROJECT_ROOT / "docs" / "operate" / "tpu-vm.md"
START_S, END_S = 600.0, 120.0
URL = "http://127.0.0.1:8000"
_POLL_S = 0.2
_BIN = str(Path(sys.executable).parent)


def commands_of(name: str) -> str:
    """What stands in the block of the page with that mark."""
    found = re.search(rf"<!-- page:{name} -->\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, name
    return found[1]


class Vm:
    """A simulated host, on which the page's commands run in a shell with its environment."""

    def __init__(self, host: Host, folder: Path, logs: Path, **variables: str) -> None:
        self.host = host
        self.log = logs / f"{host.name}.log"
        inherited = node_environment(folder)
        # These the page has to bring.
        for given in (*RAY_SETTINGS, RECONNECT, "RAY_AUTH_MODE"):
            inherited.pop(given, None)
        simulated = {SIMULATED_VARIABLE: "1", HOST_VARIABLE: "none"}
        path = f"{_BIN}:{inherited['PATH']}"
        self.environment = inherited | simulated | variables | {"PATH": path}

    def start(self, commands: str) -> Any:
        """Starts the page's environment, then these."""
        script = f"set -e\n{commands_of('environment')}{commands}"
        with self.log.open("ab") as log:
            return self.host.start(
                "bash", "-c", script, env=self.environment, stdout=log, stderr=log
            )

    def run(self, commands: str) -> None:
        started = self.start(commands)
        assert started.wait(START_S) == 0, self.log.read_text()[-4000:]

    def ray_answers(self) -> bool:
        check = self.host.start(
            "ray", "health-check", "--address=127.0.0.1:6379", env=self.environment
        )
        return bool(check.wait(END_S) == 0)

    def serve(self, command: str) -> Any:
        """Starts `slicewise serve`; returns it once its engine is ready."""
        serving = self.start(f"exec {command}")

        deadline_s = time.monotonic() + START_S
        before = self.log.read_text().count("\nServing on")
        while self.log.read_text().count("\nServing on") == before:
            assert serving.poll() is None, self.log.read_text()[-8000:]
            assert time.monotonic() < deadline_s, self.log.read_text()[-8000:]
            time.sleep(_POLL_S)
        return serving

    def end_serving(self, serving: Any) -> None:
        """Ctrl-C."""
        (command,) = [
            each
            for each in self.host.processes(f"{sys.executable} {_BIN}/slicewise serve")
            if each.is_running()
        ]
        command.send_signal(signal.SIGINT)
        assert serving.wait(END_S) == 0, self.log.read_text()[-4000:]


def on_paced_engine(name: str, folder: Path) -> tuple[Path, str]:
    """The page's configuration with an engine that needs no TPU, and the name of its model."""
    raw = yaml.safe_load((PROJECT_ROOT / name).read_text())
    (model,) = raw["applications"][0]["args"]["models"]
    del model["compile_cache"]
    model.pop("engine_args", None)
    model |= {"engine": "paced", "source": "models/slicewise-demo", "paced": {"tpot_ms": 5}}
    for deployment in model["deployments"]:
        deployment["num_cpus"] = 0.1
    raw["applications"][0]["args"]["gateway"]["num_cpus"] = 0.1
    path = folder / Path(name).name
    path.write_text(yaml.safe_dump(raw))
    return path, model["name"]


def answer_of(host: Host, model: str) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    (reply,) = HttpCalls(host).make([Call(f"{URL}/v1/chat/completions", body)])
    return reply.json()["choices"][0]["message"]["content"]


@pytest.fixture
def network() -> Iterator[Hosts]:
    with skipped_where_refused():
        check_permitted()
    with Hosts() as hosts:
        yield hosts


def test_one_vm_serves_by_the_pages_commands_and_its_engine_outlives_the_command(
    network: Hosts, tmp_path: Path
) -> None:
    """As the page says of Ctrl-C: Ray stays, and the engine for the next `slicewise serve`."""
    vm = Vm(network.add("vm"), network.folder, tmp_path)
    start, serve = commands_of("one-vm").strip().splitlines()
    (file,) = re.findall(r"serve (\S+)", serve)
    config, model = on_paced_engine(file, tmp_path)
    vm.run(start)
    command = serve.replace(file, str(config))
    serving = vm.serve(command)
    assert answer_of(vm.host, model)
    engines = [process.pid for process in vm.host.processes("ray::EngineHost")]
    vm.end_serving(serving)
    assert vm.ray_answers()
    serving = vm.serve(command)
    assert answer_of(vm.host, model)
    assert [process.pid for process in vm.host.processes("ray::EngineHost")] == engines
    assert len(engines) == 1
    vm.end_serving(serving)
    vm.run("ray stop")
    assert vm.host.processes("ray::") == []


def test_slice_of_four_hosts_serves_by_the_pages_commands(network: Hosts, tmp_path: Path) -> None:
    first_host = network.add("first")
    others = [network.add(f"host{number}") for number in (1, 2, 3)]
    variables = {"FIRST": first_host.address}
    first = Vm(first_host, network.folder, tmp_path, **variables)
    first.run(commands_of("first-host"))
    for number, host in enumerate(others, start=1):
        joined = Vm(host, network.folder, tmp_path, WORKER=str(number), **variables)
        joined.run(commands_of("other-host"))
    serve = commands_of("serve-slice").strip()
    (file,) = re.findall(r"serve (\S+)", serve)
    config, model = on_paced_engine(file, tmp_path)
    serving = first.serve(serve.replace(file, str(config)))
    assert answer_of(first.host, model)
    # The slice is held on all of its hosts.
    agents = [len(host.processes("ray::HostAgent")) for host in (first_host, *others)]
    assert agents == [1, 1, 1, 1]
    first.end_serving(serving)


def test_address_at_which_nobody_answers_is_refused_at_once(network: Hosts, tmp_path: Path) -> None:
    vm = Vm(network.add("vm"), network.folder, tmp_path)
    _, serve = commands_of("one-vm").strip().splitlines()
    assert vm.start(serve).wait(END_S) == 1
    assert "slicewise: no Ray at 127.0.0.1:6379: " in vm.log.read_text()
