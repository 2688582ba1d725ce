"""Notes to the agents of a host: files in its run directory, and a socket of each agent.

A program on the host writes what it knows into a file of its own and calls the agents, which read
all files then. An agent that starts later reads them too, so nobody has to tell twice. Owns the
folder, the form of a note and the way to the sockets. Does not own what follows from a note
(`agent_socket`).

It imports nothing but the standard library: the program in a pod's preStop hook has no time for
more.
"""

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# From the call of the end of a host's pod to the time at which its processes may be killed.
END_WITHIN_VARIABLE = "SLICEWISE_END_WITHIN_S"
# What an agent says to a program that has called it: it has read the notes; nothing of the slice is
# left on this host.
SEEN, LEFT = b"seen\n", b"left\n"
# A handful of sources with a sentence each.
MAX_NOTE_BYTES = 64 * 1024
_NOTES, _AGENTS = "notices", "agents"
_NOTE_SUFFIX, _SOCKET_SUFFIX = ".json", ".sock"


def write_note(run_dir: Path, name: str, notices: Iterable[Mapping[str, object]]) -> None:
    """Replaces the note of that name, whole or not at all.

    Each notice has the fields of `notices.Notice` without the host's number, which the writer need
    not know.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = _made(run_dir / _NOTES)
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(json.dumps({"notices": [dict(notice) for notice in notices]}))
    draft.replace(folder / f"{name}{_NOTE_SUFFIX}")


def read_notes(run_dir: Path) -> dict[str, bytes]:
    """Returns the text of every note by its name, cut off at a byte more than one may have."""
    found = {}
    for path in sorted((run_dir / _NOTES).glob(f"[!.]*{_NOTE_SUFFIX}")):
        try:
            with path.open("rb") as file:
                found[path.stem] = file.read(MAX_NOTE_BYTES + 1)
        except OSError:
            continue
    return found


def tell(run_dir: Path, name: str, notices: Iterable[Mapping[str, object]]) -> None:
    """Replaces the note of that name, and has every agent of the host read it.

    Raises:
        OSError: the folder cannot be written.
    """
    write_note(run_dir, name, notices)
    for connection in call_agents(run_dir).values():
        connection.close()


def call_agents(run_dir: Path, known: Iterable[str] = ()) -> dict[str, socket.socket]:
    """Connects to every agent of the host but the `known`; returns the connections by name.

    The socket of an agent that has ended is removed. It never waits: an agent that does not answer
    is connected, and silent.
    """
    folder, found = run_dir / _AGENTS, {}
    for path in sorted(folder.glob(f"[!.]*{_SOCKET_SUFFIX}")):
        if path.stem in known:
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(0)
        try:
            with _short(folder) as short:
                connection.connect(f"{short}/{path.name}")
        except ConnectionRefusedError:
            connection.close()
            path.unlink(missing_ok=True)
        except OSError:
            # Its line is full (`EAGAIN`), or it is gone: it is called again, or was never needed.
            connection.close()
        else:
            found[path.stem] = connection
    return found


def agent_listener(run_dir: Path, name: str) -> socket.socket:
    """Returns the listening socket of the agent `name`, which programs here find from now on.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = _made(run_dir / _AGENTS)
    draft = f".{name}"
    (folder / draft).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(folder) as short:
            listener.bind(f"{short}/{draft}")
        listener.listen()
        # Only now: whoever finds a socket on which nobody listens removes it.
        (folder / draft).rename(folder / f"{name}{_SOCKET_SUFFIX}")
    except OSError:
        listener.close()
        raise
    return listener


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Another path of a folder: that of a socket has 108 bytes at most."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
