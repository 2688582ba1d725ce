"""Finds TCP ports for what is about to be started, so that two starts never get the same.

A port is bound only seconds after it was chosen, or later still: Serve binds those of gateways as
they come. So what is chosen is also claimed, for every process of this network namespace that asks
here, until the process that chose it ends.
"""

import random
import socket
from collections import deque

# Below the ports that Linux hands out by itself (32768 on): Ray opens many connections in the
# seconds before Serve binds its own.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
# Ports are claimed by blocks, so that a claim of many costs a few sockets.
_BLOCK = 64
# A process that starts one thing after the other gives its oldest claims back.
_MAX_CLAIMS = 24

_claims: deque[socket.socket] = deque()


def free_ports(count: int) -> range:
    """Returns a run of TCP ports that nothing listens on, claimed until this process ends.

    Raises:
        OSError: no such run was found. Stop some of what listens on this machine.
    """
    num_blocks = -(-count // _BLOCK)
    length = num_blocks * _BLOCK
    firsts = list(range(_FIRST_PORT, _LAST_PORT - length + 1, length))
    random.SystemRandom().shuffle(firsts)
    for first in firsts:
        claims = _claimed(range(first, first + length, _BLOCK))
        ports = range(first, first + count)
        if claims and all(is_free("", port) for port in ports):
            _claims.extend(claims)
            while len(_claims) > max(_MAX_CLAIMS, num_blocks):
                _claims.popleft().close()
            return ports
        _close(claims)
    raise OSError(f"no {count} free ports between {_FIRST_PORT} and {_LAST_PORT}")


def is_free(host: str, port: int) -> bool:
    """Returns whether nothing listens on a port of an address of this machine."""
    with socket.socket() as probe:
        # As HAProxy does: what only lingers of an ended server is not in the way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _claimed(blocks: range) -> list[socket.socket]:
    """The claims of these blocks, or none at all.

    A claim is an abstract Unix address. The kernel gives it to one process of a network namespace,
    which is also whom ports are shared with, and frees it when that process ends, however it does.
    """
    claims: list[socket.socket] = []
    for block in blocks:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0slicewise-ports-{block}")
        except OSError:
            _close([*claims, claim])
            return []
        claims.append(claim)
    return claims


def _close(claims: list[socket.socket]) -> None:
    for claim in claims:
        claim.close()
