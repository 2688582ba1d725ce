"""Who has no rights over this machine's network makes hosts in a user namespace, and is reached."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from deployments.simulation.hosts.namespaces import check_permitted
from deployments.start.ports import free_ports
from tests.e2e.application import PROJECT_ROOT
from tests.hosts.permission import skipped_where_refused
from tests.hosts.unprivileged import without_rights

pytestmark = pytest.mark.process

SOON_S = 30.0
# Two addresses out here; inside, something answers at the first. It is a host that is asked, so
# that it is one of the network inside.
PROGRAM = """
import pathlib, subprocess, sys
from deployments.simulation.hosts.namespaces import Hosts
from deployments.simulation.hosts.user_namespace import relaunch, settle

folder, *ports = sys.argv[1:]
settle()
relaunch([("127.0.0.1", int(port)) for port in ports])
with Hosts(pathlib.Path(folder), joins_machine=True) as network:
    host = network.add("host")
    pathlib.Path(folder, "said").write_text(host.run("hostname"))
    serve = ["-u", "-m", "http.server", ports[0], "--bind", "127.0.0.1", "--directory", folder]
    subprocess.run([sys.executable, *serve])
"""


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture
def inside(tmp_path: Path, ports: list[int]) -> Iterator[psutil.Process]:
    """The program inside, once it answers there."""
    with skipped_where_refused():
        check_permitted()
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    process = subprocess.Popen(
        [*without_rights(), sys.executable, str(path), str(tmp_path), *map(str, ports)],
        env=os.environ | {"PYTHONPATH": str(PROJECT_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving HTTP"), line + process.stdout.read()
        yield psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SOON_S)


def test_hosts_are_made_and_what_is_inside_is_reached_from_here(
    inside: psutil.Process, ports: list[int]
) -> None:
    answer = httpx.get(f"http://127.0.0.1:{ports[0]}/said", timeout=SOON_S)
    assert answer.text == "host\n"
    for kind in ("net", "user"):
        assert os.readlink(f"/proc/{inside.pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


@pytest.mark.usefixtures("inside")
def test_ends_of_a_connection_end_each_other(ports: list[int]) -> None:
    with socket.create_connection(("127.0.0.1", ports[0]), SOON_S) as connection:
        connection.sendall(b"GET /said HTTP/1.0\r\n\r\n")
        # No more to ask; the answer still comes, and then the end.
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.endswith(b"\r\n\r\nhost\n")


@pytest.mark.usefixtures("inside")
def test_who_asks_where_nobody_answers_inside_is_cut_off(ports: list[int]) -> None:
    with (
        socket.create_connection(("127.0.0.1", ports[1]), SOON_S) as connection,
        contextlib.suppress(ConnectionResetError),
    ):
        assert connection.recv(1) == b""


def test_address_that_is_taken_is_an_error(tmp_path: Path, ports: list[int]) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with skipped_where_refused():
        check_permitted()
    with socket.create_server(("127.0.0.1", ports[0])):
        done = subprocess.run(
            [*without_rights(), sys.executable, str(path), str(tmp_path), *map(str, ports)],
            env=os.environ | {"PYTHONPATH": str(PROJECT_ROOT)},
            capture_output=True,
            text=True,
            timeout=SOON_S,
            check=False,
        )
    assert done.returncode != 0
    assert "Address already in use" in done.stderr
