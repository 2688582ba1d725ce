"""Keeps others off the Ray cluster of one machine: a token of its own, and ports on loopback alone.

Whoever reaches Ray's ports runs code with the rights of who started it. Owns the token's file, and
the variables by which Ray's processes and commands find it. Does not own who else is given them.
"""

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

AUTH_MODE, TOKEN_FILE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
WITH_TOKEN = "token"
# What an address of 127.0.0.1 is to a driver, and whether a new node takes it: Ray's own switch,
# whose "0" is the default on a Mac. Ray binds its ports to the loopback where that is the node's
# address; without it `--node-ip-address=127.0.0.1` is replaced by the network's. Not for a cluster
# of several hosts: `ray start --address` refuses with it.
ON_LOOPBACK = MappingProxyType({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})

_FILE_NAME, _ENVIRONMENT_NAME = "ray-token", "ray-environment"
# As many as Ray's own tokens have.
_TOKEN_BYTES = 32
# What a command of Ray's in another terminal has to know: which cluster, and how to ask it.
_FOR_COMMANDS = ("RAY_TMPDIR", AUTH_MODE, TOKEN_FILE, *ON_LOOPBACK)


def token_file(ray_folder: Path) -> Path:
    """Returns the file with the token of the cluster in this folder, and makes it if it is new."""
    path = ray_folder / _FILE_NAME
    if not path.exists():
        _write(path, secrets.token_hex(_TOKEN_BYTES))
    return path


def copy_token(ray_folder: Path, inside: Path) -> None:
    """Gives the token to a host that has this folder for itself; `inside` is where, as seen here.

    A cluster without a token has none to give.
    """
    path = ray_folder / _FILE_NAME
    if path.exists():
        _write(inside / _FILE_NAME, path.read_text())


def environment_file(environment: Mapping[str, str], ray_folder: Path) -> Path:
    """Writes what a shell has to read so that Ray's commands find this cluster; the token's path.

    The token itself is not in it.
    """
    path = ray_folder / _ENVIRONMENT_NAME
    given = {name: environment[name] for name in _FOR_COMMANDS if name in environment}
    _write(path, "".join(f"export {k}={shlex.quote(v)}\n" for k, v in given.items()))
    return path


def shell_hint(environment: Mapping[str, str], ray_folder: Path) -> str:
    """Writes that file, and returns what a user has to be told of it."""
    path = environment_file(environment, ray_folder)
    return f"For serve status and other commands of Ray, in their shell first: . {path}"


def _write(path: Path, text: str) -> None:
    # The mode is there from the beginning, whatever the umask.
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
