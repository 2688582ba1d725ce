"""Who may speak to Ray: every port that listens, and what a stranger gets there."""

import ctypes
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from .application import (
    PROJECT_ROOT,
    RunningApplication,
    application_args,
    demo_model,
    paced_model,
    title,
)

pytestmark = [pytest.mark.e2e, pytest.mark.needs("ip")]

PAGE = PROJECT_ROOT / "docs" / "operate" / "security.md"
# The rows of the page's table, by how the title of the process that listens begins or goes on.
KINDS = {
    "HAProxy": r".*haproxy .*-f ",
    "gateway": r"ray::ServeReplica:slicewise:gateway",
    "other replicas": r"ray::ServeReplica:slicewise:(?!gateway)",
    "engine host": r"ray::EngineHostActor",
    "vLLM worker": r"VLLM::Worker",
    "Serve's proxy": r"ray::(ProxyActor|HAProxyManager)",
    "Serve's controller": r"ray::ServeController",
    "driver": r".*serve run |ray::IDLE",
    "GCS": r".*gcs_server ",
    "raylet": r".*raylet ",
    "dashboard": r".*dashboard\.py ",
    "agents": r"ray::(DashboardAgent|RuntimeEnvAgent)",
    "autoscaler's monitor": r".*monitor\.py ",
}
DASHBOARD, REPLICA = KINDS["dashboard"], r"ray::ServeReplica:"
# What each has for Ray, in 2.60: some of it tells something, and some has something done.
PATHS = [
    (DASHBOARD, "/api/serve/applications/"),
    (DASHBOARD, "/api/jobs/"),
    (r"ray::DashboardAgent", "/api/job_agent/jobs/"),
    (r"ray::RuntimeEnvAgent", "/get_or_create_runtime_env"),
]
NODES_CALL = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
RAYLET_CALL = "/ray.rpc.NodeManagerService/GetNodeStats"
HANDLE_CALL = "/ray.serve.ASGIService/HandleRequest"
CALLS = [
    (KINDS["GCS"], NODES_CALL),
    (KINDS["raylet"], RAYLET_CALL),
    (r"ray::DashboardAgent", "/ray.rpc.ReporterService/GetTraceback"),
    *(
        (KINDS[kind], "/ray.rpc.CoreWorkerService/NumPendingTasks")
        for kind in ("driver", "gateway", "Serve's controller")
    ),
]
# Whoever is let in may run code: this is some.
DRIVER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote()))
"""
LONG_S = 120.0
_CLONE_NEWNET = 0x40000000  # of <linux/sched.h>


@pytest.fixture(scope="module", autouse=True)
def own_network() -> Iterator[None]:
    """A network of this module's own, so that no other cluster has the ports looked at.

    Ray's agent and its autoscaler's monitor have one port each that is the same in every cluster,
    and go on without it where another cluster of the machine has it. Only root can change networks
    within a process; who is not root runs no other cluster beside this test.
    """
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as outside:
        assert libc.unshare(_CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(outside.fileno(), _CLONE_NEWNET) == 0


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


STRANGERS: tuple[dict[str, str], ...] = ({}, bearer("a" * 64))


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    """What `make serve` runs, with one engine: another would listen as it does."""
    one = demo_model(deployments=[{"compute_class": "local", "replicas": 1, "num_cpus": 0.1}])
    with RunningApplication(application_args(one), through="slicewise") as running:
        yield running


@pytest.fixture(scope="module")
def environment_path(application: RunningApplication) -> Path:
    return named_file(application)


def named_file(application: RunningApplication) -> Path:
    """The file that the command names for other terminals."""
    found = re.search(r"in their shell first: \. (\S+)", application.log_text())
    assert found, application.log_tail()
    return Path(found[1])


@pytest.fixture(scope="module")
def token(environment_path: Path) -> str:
    return (environment_path.parent / "ray-token").read_text()


def processes(application: RunningApplication) -> list[psutil.Process]:
    """All that the command started, and the command."""
    found = {each.pid: each for each in application.processes()}
    for each in psutil.Process().children():
        if title(each).endswith(str(application.config_path)):
            found[each.pid] = each
    return list(found.values())


def listeners(application: RunningApplication) -> set[tuple[str, int, str]]:
    """Address, port and title of everything that takes connections."""
    found = set()
    for process in processes(application):
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                found.add((each.laddr.ip, each.laddr.port, title(process)))
    return found


def ports(application: RunningApplication, kind: str) -> list[int]:
    return sorted(port for _, port, name in listeners(application) if re.match(kind, name))


def documented() -> set[str]:
    """The first column of the page's table of ports."""
    _, _, below = PAGE.read_text().partition("\n## Ports on one machine\n")
    section, _, _ = below.partition("\nBeyond loopback")
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {row.partition("(")[0].strip() for row in rows[1:]}


def terminal(path: Path | None, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What another terminal says, after it has read `path`."""
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))}
    program = str(Path(sys.executable).with_name(command[0]))
    read = f". {path}; " if path is not None else ""
    return subprocess.run(
        ["sh", "-c", f'{read}exec "$0" "$@"', program, *command[1:]],
        env=bare | more,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def test_every_port_is_on_the_loopback_or_asks_for_the_token(
    application: RunningApplication, token: str
) -> None:
    beyond = [each for each in sorted(listeners(application)) if not is_loopback(each[0])]
    # Serve binds the port of a replica for calls of handles to all interfaces, whatever is said.
    assert [each for each in beyond if not re.match(REPLICA, each[2])] == []
    for _, port, _ in beyond:
        answers = [call(f"127.0.0.1:{port}", HANDLE_CALL, of) for of in (*STRANGERS, bearer(token))]
        assert answers[:2] == ["UNAUTHENTICATED"] * 2
        assert answers[2] not in ("UNAUTHENTICATED", "UNAVAILABLE", "UNIMPLEMENTED")


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    inside = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (inside or found).is_loopback


def test_who_listens_is_what_the_page_says(application: RunningApplication) -> None:
    kinds = {
        address: [kind for kind, pattern in KINDS.items() if re.match(pattern, address[2])]
        for address in listeners(application)
    }
    assert {address: of for address, of in kinds.items() if len(of) != 1} == {}
    assert {of[0] for of in kinds.values()} == set(KINDS) == documented()


def test_no_socket_of_a_path_can_be_reached_by_another_user(
    application: RunningApplication,
) -> None:
    paths = {
        Path(each.laddr)
        for process in processes(application)
        for each in process.net_connections("unix")
        # Abstract ones hold our claims of ports; nobody reads them.
        if each.laddr.startswith("/")
    }
    assert any(path.name == "raylet" for path in paths)
    assert sorted(filter(is_open, paths)) == []


def is_open(path: Path) -> bool:
    """Whether others may enter all folders of a socket and write to it."""
    if not path.exists():
        return False
    others = all(each.stat().st_mode & stat.S_IXOTH for each in path.parents)
    return bool(others and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def test_driver_without_the_token_runs_nothing(
    application: RunningApplication, environment_path: Path
) -> None:
    (port,) = ports(application, KINDS["GCS"])
    driver = ("python", "-c", DRIVER, f"127.0.0.1:{port}")
    let_in = terminal(environment_path, *driver)
    assert let_in.stdout == "42\n", let_in.stderr
    here = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    for stranger in (
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64},
    ):
        refused = terminal(None, *driver, **here, **stranger)
        assert refused.stdout == ""
        assert "authentication" in refused.stderr.lower()
        assert refused.returncode != 0


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_http_without_the_token_is_refused(
    application: RunningApplication, token: str, kind: str, path: str
) -> None:
    answers = [
        [ask(f"http://127.0.0.1:{port}{path}", of) for of in (*STRANGERS, bearer(token))]
        for port in ports(application, kind)
    ]
    # The others are for metrics or do not speak HTTP.
    (guarded,) = [each for each in answers if each[0] == httpx.codes.UNAUTHORIZED]
    assert guarded[1] == httpx.codes.FORBIDDEN
    assert guarded[2] not in (None, *guarded[:2])


def ask(url: str, headers: Mapping[str, str]) -> int | None:
    """The status of the answer; `None` where HTTP is not spoken."""
    try:
        return httpx.get(url, headers=headers, timeout=10).status_code
    except httpx.HTTPError:
        return None


@pytest.mark.parametrize(("kind", "method"), CALLS)
def test_call_without_the_token_is_refused(
    application: RunningApplication, token: str, kind: str, method: str
) -> None:
    outcomes = [
        [call(f"127.0.0.1:{port}", method, of) for of in (*STRANGERS, bearer(token))]
        for port in ports(application, kind)
    ]
    # The others do not have this, or do not speak gRPC.
    refusing = [each for each in outcomes if each[0] not in ("UNAVAILABLE", "UNIMPLEMENTED")]
    assert refusing != []
    for each in refusing:
        assert each[:2] == ["UNAUTHENTICATED"] * 2
        assert each[2] not in ("UNAUTHENTICATED", "UNAVAILABLE", "UNIMPLEMENTED")


@pytest.mark.parametrize("method", ["Pull", "Push"])
@pytest.mark.parametrize("stranger", STRANGERS, ids=["no-token", "wrong-token"])
def test_object_is_neither_taken_nor_given_without_the_token(
    application: RunningApplication, method: str, stranger: Mapping[str, str]
) -> None:
    # With the token these would do something; of a raylet's two ports one is for objects.
    outcomes = [
        call(f"127.0.0.1:{port}", f"/ray.rpc.ObjectManagerService/{method}", stranger)
        for port in ports(application, KINDS["raylet"])
    ]
    assert sorted(outcomes) == ["UNAUTHENTICATED", "UNIMPLEMENTED"]


def call(address: str, method: str, metadata: Mapping[str, str]) -> str:
    """The code with which gRPC answers an empty request."""
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=10, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def test_serve_status_works_for_who_reads_the_file_and_for_nobody_else(
    application: RunningApplication, environment_path: Path
) -> None:
    (port,) = [
        port
        for port in ports(application, DASHBOARD)
        if ask(f"http://127.0.0.1:{port}/api/jobs/", {}) == httpx.codes.UNAUTHORIZED
    ]
    status = ("serve", "status", "--address", f"http://127.0.0.1:{port}")
    known = terminal(environment_path, *status)
    assert "status: RUNNING" in known.stdout, known.stderr
    unknown = terminal(None, *status)
    assert unknown.returncode != 0
    assert "Missing authentication token" in unknown.stderr + unknown.stdout


def test_token_is_in_one_file_of_its_users_and_nowhere_else(
    application: RunningApplication, environment_path: Path, token: str
) -> None:
    folder = environment_path.parent
    assert len(token) == 64
    for path, mode in ((folder, 0o700), (folder / "ray-token", 0o600), (environment_path, 0o600)):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (os.getuid(), mode)
    assert token not in environment_path.read_text()
    assert [title(each) for each in processes(application) if token in title(each)] == []
    logs = application.log_files()
    assert len(logs) > 10
    assert [path for path in logs if token.encode() in path.read_bytes()] == []


PLAN = {
    "slices": [
        {
            "name": "spot",
            "compute_class": "spot",
            "generation": "v6e",
            "topology": "2x4",
            "chips_per_host": 4,
        }
    ]
}
NODES = """
import sys
from ray._raylet import GcsClient
for node in GcsClient(address=sys.argv[1]).get_all_node_info().values():
    print(node.node_manager_address, node.node_manager_port)
"""


@pytest.fixture(scope="module")
def simulated() -> Iterator[RunningApplication]:
    """What `make sim` runs, with one slice of two hosts, each of which got the token."""
    shape = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
    deployment = {"compute_class": "spot", "replicas": 1, "num_cpus": 0.01, "slice": shape}
    with RunningApplication(
        application_args(paced_model(deployments=[deployment])),
        through="sim",
        plan=PLAN,
        # As a user starts it, who has said nothing of a token.
        environment={"RAY_AUTH_MODE": None},
    ) as running:
        yield running


# `make sim` is the same start with more nodes: what `make serve` guards is tried above.
@pytest.mark.long
def test_every_node_of_a_simulated_cluster_refuses_calls_without_the_token(
    simulated: RunningApplication,
) -> None:
    path = named_file(simulated)
    token = (path.parent / "ray-token").read_text()
    head = str(simulated.simulation("describe")["ray_address"])
    answers = [call(head, NODES_CALL, of) for of in ({}, bearer(token))]
    assert answers == ["UNAUTHENTICATED", "OK"]
    listed = terminal(path, "python", "-c", NODES, head)
    nodes = [":".join(line.split()) for line in listed.stdout.splitlines()]
    assert len(nodes) == 3, listed.stderr
    for node in nodes:
        answers = [call(node, RAYLET_CALL, of) for of in ({}, bearer(token))]
        assert answers == ["UNAUTHENTICATED", "OK"]
