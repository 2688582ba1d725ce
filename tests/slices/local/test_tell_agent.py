"""The preStop command as the kubelet runs it, against an agent's own socket."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from serving.config.slice_spec import RUN_DIR_VARIABLE as AGENTS_VARIABLE
from serving.slices.local.agent_socket import AgentSocket
from serving.slices.local.notes import END_WITHIN_VARIABLE, call_agents
from serving.slices.local.tell_agent import RUN_DIR_VARIABLE
from serving.slices.notices import NoticeKind
from tests.slices.sinks import RecordingSink

pytestmark = pytest.mark.process

COMMAND = [sys.executable, "-I", "-m", "serving.slices.local.tell_agent"]
SOURCE = (2, "pod preStop")

Agent = tuple[AgentSocket, RecordingSink]
Hook = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A path that is longer than a socket's may be."""
    return tmp_path / ("long-" * 20) / "run"


@pytest.fixture
async def agent(run_dir: Path) -> AsyncIterator[Agent]:
    sink = RecordingSink()
    agent = AgentSocket(run_dir, 2, sink)
    await agent.listen()
    yield agent, sink
    await agent.close()


@pytest.fixture
async def hook(run_dir: Path) -> AsyncIterator[Hook]:
    """Starts the command with so many seconds; ends it if the test has not waited for it."""
    started = []

    async def start(within: str = "60") -> asyncio.subprocess.Process:
        environment = {RUN_DIR_VARIABLE: f"{run_dir}", END_WITHIN_VARIABLE: within}
        process = await asyncio.create_subprocess_exec(
            *COMMAND, env=environment, stderr=asyncio.subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(60):
        return await process.wait()


def test_variable_is_the_one_that_agents_read() -> None:
    assert RUN_DIR_VARIABLE == AGENTS_VARIABLE


def test_command_imports_nothing_beyond_the_standard_library() -> None:
    program = "import sys, serving.slices.local.tell_agent; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    # The hooks of an editable installation and of coverage are loaded by every interpreter.
    own = {"serving", "__editable___slicewise_0_1_0_finder", "_distutils_hack", "coverage"}
    foreign = {name.partition(".")[0] for name in loaded.stdout.split()} - own
    assert foreign - sys.stdlib_module_names <= {"__main__", "__mp_main__", "sitecustomize"}


async def test_host_that_nobody_holds_is_let_go_at_once(hook: Hook, run_dir: Path) -> None:
    assert await ended(await hook("3600")) == 0
    # An agent that was about to start knows.
    sink = RecordingSink()
    late = AgentSocket(run_dir, 2, sink)
    await late.listen()
    assert SOURCE in sink.now
    await late.close()


async def test_agent_is_told_the_absolute_end_and_the_pod_held_until_the_slice_is_left(
    agent: Agent, hook: Hook
) -> None:
    socket, sink = agent
    before_s = time.time()
    process = await hook("25")
    await sink.wait_for(lambda sink: SOURCE in sink.now)
    told = sink.now[SOURCE]
    assert told.kind == NoticeKind.TERMINATION_SIGNAL
    assert told.worker_id == 2
    assert told.deadline_s is not None
    assert before_s + 25 <= told.deadline_s <= time.time() + 25
    assert process.returncode is None
    socket.tell_left()
    assert await ended(process) == 0
    assert time.time() < told.deadline_s


async def test_pod_is_held_no_longer_than_it_has(agent: Agent, hook: Hook) -> None:
    before_s = time.time()
    assert await ended(await hook("1.5")) == 0
    assert time.time() - before_s >= 1.4


async def test_pod_is_held_until_every_agent_has_left(
    agent: Agent, hook: Hook, run_dir: Path
) -> None:
    """Two agents: each in a process of its own, as on a host, for a process has one socket."""
    socket, sink = agent
    other = await other_agent(run_dir)
    process = await hook("60")
    await sink.wait_for(lambda sink: SOURCE in sink.now)
    assert await line(other) == "told"
    other.send_signal(signal.SIGUSR1)
    assert await line(other) == "left"
    assert process.returncode is None
    socket.tell_left()
    assert await ended(process) == 0
    await end(other)


async def test_agent_that_does_not_answer_holds_the_pod_until_its_time_is_over(
    hook: Hook, run_dir: Path
) -> None:
    other = await other_agent(run_dir)
    other.send_signal(signal.SIGSTOP)
    before_s = time.time()
    assert await ended(await hook("1.5")) == 0
    assert time.time() - before_s >= 1.4
    other.send_signal(signal.SIGCONT)
    await end(other)


async def test_agent_that_dies_without_a_word_is_waited_for_until_the_next_has_left(
    hook: Hook, run_dir: Path
) -> None:
    first = await other_agent(run_dir)
    process = await hook("60")
    assert await line(first) == "told"
    await end(first)
    second = await other_agent(run_dir)
    # It reads what the first one was told, and the hook finds it.
    assert await line(second) == "told"
    assert process.returncode is None
    second.send_signal(signal.SIGUSR1)
    assert await ended(process) == 0
    await end(second)


async def test_socket_of_an_agent_that_is_gone_holds_nothing(hook: Hook, run_dir: Path) -> None:
    await end(await other_agent(run_dir))
    assert list((run_dir / "agents").iterdir())
    assert await ended(await hook("3600")) == 0
    assert not list((run_dir / "agents").iterdir())


@pytest.mark.parametrize("within", ["", "soon", "nan", "inf", "-1", "0", "1e9"])
async def test_nonsense_is_refused_and_names_what_is_allowed(
    hook: Hook, agent: Agent, within: str
) -> None:
    process = await hook(within)
    assert await ended(process) == 2
    assert process.stderr is not None
    assert "allowed: a number above 0" in (await process.stderr.read()).decode()
    assert not agent[1].announced


async def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for folder in (f"{in_the_way}", ""):
        environment = {RUN_DIR_VARIABLE: folder, END_WITHIN_VARIABLE: "60"}
        process = await asyncio.create_subprocess_exec(
            *COMMAND, env=environment, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        assert process.returncode == 2
        assert (folder or RUN_DIR_VARIABLE) in said.decode()


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff",
        b"{}",
        b'{"notices": 5}',
        b'{"notices": [{"kind": "party", "reason": "", "source": ""}]}',
        b'{"notices": [], "padding": "' + b"x" * 70_000 + b'"}',
    ],
    ids=["empty", "bytes", "other", "type", "kind", "long"],
)
async def test_note_that_makes_no_sense_changes_nothing(
    agent: Agent, run_dir: Path, note: bytes
) -> None:
    socket, sink = agent
    (run_dir / "notices").mkdir()
    good = {"kind": "maintenance", "reason": "some day", "source": "node label"}
    (run_dir / "notices" / "node.json").write_text(json.dumps({"notices": [good]}))
    socket.look()
    assert (2, "node label") in sink.now
    (run_dir / "notices" / "node.json").write_bytes(note)
    (run_dir / "notices" / "other.json").write_text(
        json.dumps({"notices": [good | {"source": "b"}]})
    )
    socket.look()
    assert sorted(sink.now) == [(2, "b"), (2, "node label")]


async def test_notice_that_a_note_no_longer_has_is_withdrawn(agent: Agent, run_dir: Path) -> None:
    socket, sink = agent
    folder = run_dir / "notices"
    folder.mkdir()
    good = {"kind": "maintenance", "reason": "some day", "source": "node label"}
    (folder / "node.json").write_text(json.dumps({"notices": [good]}))
    socket.look()
    (folder / "node.json").write_text(json.dumps({"notices": []}))
    socket.look()
    assert sink.withdrawn == [(2, "node label")]
    assert sink.now == {}


async def test_end_that_is_past_was_another_hosts(agent: Agent, run_dir: Path) -> None:
    socket, sink = agent
    folder = run_dir / "notices"
    folder.mkdir()
    end = {"kind": "termination_signal", "reason": "", "source": "pod preStop", "deadline_s": 1.0}
    (folder / "pod.json").write_text(json.dumps({"notices": [end]}))
    socket.look()
    assert sink.announced == []


async def test_caller_too_many_is_turned_away(agent: Agent, run_dir: Path) -> None:
    held = [call_agents(run_dir)[f"{os.getpid()}"] for _ in range(20)]
    found = []
    for connection in held:
        connection.settimeout(0)
        loop = asyncio.get_running_loop()
        try:
            found.append(await loop.sock_recv(connection, 100))
        except ConnectionError:
            found.append(b"")
    assert found == [b"seen\n"] * 16 + [b""] * 4
    for connection in held:
        connection.close()


async def test_door_is_a_file_that_its_user_alone_opens_and_no_port(run_dir: Path) -> None:
    def ports() -> set[object]:
        return {each.laddr for each in psutil.Process().net_connections() if not each.raddr}

    def abstract() -> set[str]:
        paths = [each.laddr for each in psutil.Process().net_connections(kind="unix")]
        return {path for path in paths if path.startswith(("@", "\0"))}

    before, abstract_before = ports(), abstract()
    agent = AgentSocket(run_dir, 2, RecordingSink())
    await agent.listen()
    assert ports() == before
    folder = run_dir / "agents"
    assert [path.is_socket() for path in folder.iterdir()] == [True]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # One in the abstract namespace would be open to everybody on the host's network.
    assert abstract() == abstract_before
    await agent.close()


_AGENT = """
import asyncio, pathlib, signal, sys
from serving.slices.local.agent_socket import AgentSocket

class Sink:
    def announce(self, notice):
        print("told", flush=True)

    def withdraw(self, worker_id, source):
        pass

async def main():
    agent = AgentSocket(pathlib.Path(sys.argv[1]), 2, Sink())

    def leave():
        agent.tell_left()
        print("left", flush=True)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, leave)
    await agent.listen()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def other_agent(run_dir: Path) -> asyncio.subprocess.Process:
    """An agent in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _AGENT, f"{run_dir}", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while (await process.stdout.readline()).strip() != b"ready":
            pass
    return process


async def line(process: asyncio.subprocess.Process) -> str:
    """What an agent says next."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().strip()


async def end(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()
