"""Hosts of one machine that are apart as real hosts are: namespaces, and a network between them.

Each host has its own processes, network address, host name, `/dev/shm` and folder for temporary
files; the file system is otherwise this machine's. Owns what the hosts are made of and their end.
Does not own what runs on them. Different from real hosts: one kernel, one clock, the same CPUs.

Needs util-linux (`unshare`, `nsenter`) and iproute2 (`ip`), and the right to make namespaces: root
with all capabilities, or any user where the system lets users have namespaces. To be on the hosts'
network itself, the machine needs to be run by root.

Every host lives as long as a pipe of this process is open. So none outlives this process, however
that ends, and nothing of the network is seen outside, but for the machine's own interface on it.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

# Seconds for one command on a host that does little more than start.
_COMMAND_S = 30.0
# For tests of networks on one's own premises (RFC 2544): nobody's machine has a route to it. The
# third number is that of the machine's interface; without one the network leads nowhere, and is 0.
_NETWORK = "198.18"
_ROUTER = 1
_FIRST_HOST = 10
_MAX_HOSTS = 240
_BRIDGE = "hosts"
_INTERFACE = "slicewise"
_MAX_NETWORKS = 250
_HOST_KINDS = ("--net", "--pid", "--mount", "--uts", "--ipc")
# A child that ends is reaped, though the first process of a host waits for none: the kernel does it
# where SIGCHLD is ignored. `cat` ends when the pipe is closed.
_STAY = "echo ready && exec env --ignore-signal=CHLD cat > /dev/null"


# What making hosts needs the right to do, tried where it leaves no trace.
_TRIAL = """
mount -t tmpfs tmpfs /dev/shm && ip link add trial type bridge &&
ip link add trial-a type veth peer name trial-b
"""


class NotPermittedError(RuntimeError):
    """This system lets us make no such namespaces, or lacks a program. The message says which."""


@functools.cache
def unshare(*kinds: str, trial: str = "true") -> tuple[str, ...]:
    """The command that starts another one in new namespaces (`--pid` and so on).

    As we are, or in a user namespace: what lets the shell commands of `trial` succeed there.

    Raises:
        NotPermittedError: neither does.
    """
    if shutil.which("unshare") is None:
        raise NotPermittedError("no program unshare")
    refusals = []
    for users in ((), ("--user", "--map-root-user")):
        command = ("unshare", *users, *kinds, "--fork")
        tried = subprocess.run(
            [*command, "sh", "-c", trial],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if tried.returncode == 0:
            return command
        refusals.append(tried.stderr.strip())
    raise NotPermittedError("; ".join(refusals))


def check_permitted() -> None:
    """Tries whether hosts can be made.

    Raises:
        NotPermittedError: they cannot.
    """
    for program in ("nsenter", "ip"):
        if shutil.which(program) is None:
            raise NotPermittedError(f"no program {program}")
    unshare(*_HOST_KINDS, "--mount-proc", trial=_TRIAL)


def is_of_simulated_host(address: str) -> bool:
    """Returns whether an address is on such a network as hosts are made on here."""
    return address.startswith(f"{_NETWORK}.")


def can_join_machine() -> bool:
    """Returns whether this machine may be on a network of hosts that it makes."""
    try:
        check_permitted()
    except NotPermittedError:
        return False
    return "--user" not in unshare(*_HOST_KINDS, "--mount-proc", trial=_TRIAL)


class Host:
    """One host. `Hosts.add` makes it. Its end is the end of everything that runs on it."""

    def __init__(self, network: "Hosts", number: int, name: str) -> None:
        self.name = name
        self.number = number
        self.address = network.address_of(_FIRST_HOST + number)
        self._network = network
        self.cable = f"host{number}"
        self._started: list[subprocess.Popen[Any]] = []
        self._unshare, self._pid = self._start()
        self._pid_namespace = _pid_namespace(self._pid)
        try:
            self._connect()
        except BaseException:
            self.end()
            raise

    @property
    def first_pid(self) -> int:
        """The host's first process, as seen from here: what runs on the host is below it."""
        return self._pid

    def command(self, *command: str) -> list[str]:
        """What has to be run here to have `command` run on the host, in this working directory."""
        place = ("env", f"--chdir={Path.cwd()}")
        return [*self._network.enter(self._pid, *_HOST_KINDS), *place, *command]

    def run(self, *command: str, **options: Any) -> str:
        """Runs it to its end; what it prints.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        return _output(self.command(*command), **options)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts it. What is returned ends when it ends, and does not take it along when killed.

        The process itself is among `processes`.
        """
        process = subprocess.Popen(self.command(*command), start_new_session=True, **options)
        self._started.append(process)
        return process

    def processes(self, title: str = "") -> list[psutil.Process]:
        """What runs on the host with titles that begin so, oldest first, as seen from here."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_here = _pid_namespace(process.pid) == self._pid_namespace
                if is_here and " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def path(self, path: Path) -> Path:
        """Where a file of the host is, as seen from here, as long as the host lives."""
        return Path(f"/proc/{self._pid}/root") / path.relative_to("/")

    def cut(self) -> None:
        """Takes it off the network; everything on it goes on."""
        self._network.run("ip", "link", "set", self.cable, "down")

    def join(self) -> None:
        """Puts it back on."""
        self._network.run("ip", "link", "set", self.cable, "up")

    def end(self) -> None:
        """Ends it as a power cut does. When this returns none of its processes is left.

        Idempotent.
        """
        if self._unshare.poll() is None:
            # The kernel kills the others of the namespace, and the first is gone when they are.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        for process in (self._unshare, *self._started):
            _close(process)
        self._network.forget(self)

    def _start(self) -> tuple[subprocess.Popen[str], int]:
        folder = self._network.folder
        # With a name server that cannot be reached each look-up would wait for its time-out.
        names = f"127.0.0.1 localhost\\n{self.address} {self.name}\\n"
        kept = self._network.kept_folder(self)
        steps = [
            f"hostname {self.name}",
            f"mount -t tmpfs tmpfs {folder}" if kept is None else f"mount --bind {kept} {folder}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"printf '{names}' > {folder}/.hosts && : > {folder}/.resolv.conf",
            f"mount --bind {folder}/.hosts /etc/hosts",
            f"mount --bind {folder}/.resolv.conf /etc/resolv.conf",
            _STAY,
        ]
        isolate = ["unshare", *_HOST_KINDS, "--fork", "--kill-child", "--mount-proc"]
        command = [*self._network.enter(), *isolate, "sh", "-c", " && ".join(steps)]
        process = _holding(command)
        return process, psutil.Process(process.pid).children()[0].pid

    def _connect(self) -> None:
        outside = f"link add {self.cable} type veth peer name eth0 netns {self._pid}"
        self._network.run("ip", *outside.split())
        self._network.run("ip", "link", "set", self.cable, "master", _BRIDGE, "up")
        inside = [
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            # Ray asks which of its addresses it would speak to the internet with.
            f"route add default via {self._network.address_of(_ROUTER)}",
        ]
        for step in inside:
            self.run("ip", *step.split())


class Hosts:
    """A network, and the hosts on it. A context manager; all ends with it.

    `folder` is the one for temporary files that each host has for itself, empty at first, at the
    same path. With `kept_in`, an existing folder, it is that one, and what a host writes there
    stays in `kept_in/hosts/NAME-NUMBER`; without, it is a new one, and goes with the host. With
    `joins_machine` this machine is on the network too, as `machine_address`.
    """

    def __init__(self, kept_in: Path | None = None, *, joins_machine: bool = False) -> None:
        self.folder = Path() if kept_in is None else kept_in
        self._is_kept = kept_in is not None
        self._joins_machine = joins_machine
        self._number = 0
        self._has_users = False
        self._hosts: dict[int, Host] = {}
        self._next_host = 0
        self._holder: subprocess.Popen[str]
        self._end = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Makes the network.

        Raises:
            NotPermittedError: this system does not permit it.
        """
        check_permitted()
        command = unshare(*_HOST_KINDS, "--mount-proc", trial=_TRIAL)
        self._has_users = "--user" in command
        if self._has_users and self._joins_machine:
            raise NotPermittedError("this machine's own network takes an interface from root only")
        with contextlib.ExitStack() as end:
            if not self._is_kept:
                # Ray's sockets lie below it, and their paths may have at most 107 bytes.
                self.folder = Path(tempfile.mkdtemp(prefix="h-"))
                # What hosts had in it is gone with their mounts.
                end.callback(self.folder.rmdir)
            users = ("--user", "--map-root-user") if self._has_users else ()
            self._holder = _holding(["unshare", *users, "--net", "sh", "-c", _STAY])
            end.callback(_close, self._holder)
            end.callback(self._end_hosts)
            self.run("ip", "link", "set", "lo", "up")
            self.run("ip", "link", "add", _BRIDGE, "type", "bridge")
            self.run("ip", "link", "set", _BRIDGE, "up")
            if self._joins_machine:
                self._join_machine(end)
            else:
                self.run("ip", "addr", "add", f"{self.machine_address}/24", "dev", _BRIDGE)
            self._end = end.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    @property
    def machine_address(self) -> str:
        """What the hosts reach this machine by, if it is on the network."""
        return self.address_of(_ROUTER)

    def address_of(self, last: int) -> str:
        """The address with this last number on the network."""
        return f"{_NETWORK}.{self._number}.{last}"

    def add(self, name: str) -> Host:
        """One more host. Addresses are given again, the one that was free for longest first.

        Raises:
            ValueError: there are too many.
        """
        if len(self._hosts) == _MAX_HOSTS:
            raise ValueError(f"there are {_MAX_HOSTS} hosts; allowed: {_MAX_HOSTS}")
        while self._next_host in self._hosts:
            self._next_host = (self._next_host + 1) % _MAX_HOSTS
        number = self._next_host
        self._next_host = (number + 1) % _MAX_HOSTS
        self._hosts[number] = host = Host(self, number, name)
        return host

    def forget(self, host: Host) -> None:
        """Has the address of a host that has ended for another one, unless one has it already."""
        if self._hosts.get(host.number, host) is host:
            self._hosts.pop(host.number, None)
            # The kernel takes it away too, but some time after the host's last process.
            with contextlib.suppress(subprocess.CalledProcessError):
                self.run("ip", "link", "delete", host.cable)

    def kept_folder(self, host: Host) -> Path | None:
        """Where what a host writes in `folder` is kept; `None` where it is not."""
        if not self._is_kept:
            return None
        kept = self.folder / "hosts" / f"{host.name}-{host.number}"
        # A new host has nothing of the one before at its address.
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        return kept

    def enter(self, pid: int | None = None, *kinds: str) -> list[str]:
        """What runs the command behind it in these namespaces of a process.

        Without a process: in the network's, where there is the bridge and no host.
        """
        to = pid or self._holder.pid
        users = ("--user", "--preserve-credentials") if self._has_users else ()
        return ["nsenter", "--target", str(to), *users, *(kinds or ("--net",)), "--"]

    def run(self, *command: str) -> str:
        """Runs a command on the network itself; what it prints."""
        return _output([*self.enter(), *command])

    def _join_machine(self, end: contextlib.ExitStack) -> None:
        # Two at once do not get the same interface, and so not the same addresses. Of a process
        # that is killed it goes a moment later, with the other end of the cable.
        for number in range(_MAX_NETWORKS):
            ours = f"{_INTERFACE}{number}"
            cable = f"link add {ours} type veth peer name machine netns {self._holder.pid}"
            try:
                _output(["ip", *cable.split()])
            except subprocess.CalledProcessError as error:
                if "File exists" in str(error.stderr):
                    continue
                raise NotPermittedError(f"no interface {ours}: {error.stderr.strip()}") from error
            self._number = number
            end.callback(_delete_link, ours)
            _output(["ip", "addr", "add", f"{self.machine_address}/24", "dev", ours])
            _output(["ip", "link", "set", ours, "up"])
            self.run("ip", "link", "set", "machine", "master", _BRIDGE, "up")
            return
        raise NotPermittedError(f"all interfaces {_INTERFACE}0 to {_MAX_NETWORKS - 1} are taken")

    def _end_hosts(self) -> None:
        for host in tuple(self._hosts.values()):
            host.end()


def _holding(command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts what ends when the pipe to it is closed, and waits until it is ready."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # An interrupt at the terminal is for us, who end them then.
        start_new_session=True,
    )
    if process.stdout is None or process.stdout.readline() != "ready\n":
        _, complaint = process.communicate(timeout=_COMMAND_S)
        raise RuntimeError(f"{' '.join(command)}: {complaint.strip()}")
    return process


def _close(process: subprocess.Popen[Any]) -> None:
    """Closes the pipes to a process that ends of it, or has ended. Idempotent."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    process.wait(_COMMAND_S)


def _delete_link(name: str) -> None:
    """Deletes an interface, which may have gone with the namespace of its cable's other end."""
    try:
        _output(["ip", "link", "delete", name])
    except subprocess.CalledProcessError as error:
        if "Cannot find device" not in str(error.stderr):
            raise


def _output(command: Sequence[str], **options: Any) -> str:
    options = {"timeout": _COMMAND_S} | options
    done = subprocess.run(command, check=True, capture_output=True, text=True, **options)
    return str(done.stdout)


def _pid_namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino
