"""The limits and rules of serving that several parts have to know, with the only default of each.

Configuration, the specs that it is handed down in, and the simulator take their defaults from here,
so that a simulated gateway refuses, waits and drains as a real one does. Pure.
"""

import ipaddress
from enum import StrEnum

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# How long a request waits for an engine before it fails; and one that asks to be served when there
# is room: as long as OpenAI's clients wait for an answer.
REQUEST_DEADLINE_S = 60.0
FLEX_DEADLINE_S = 600.0
# Requests that wait at one gateway for an engine. Further ones are refused.
MAX_WAITING_REQUESTS = 1024
# Answers, and inputs of a pooling model, that one request may ask for.
MAX_SEQUENCES = 128
MAX_INPUTS = 2048
# A gateway's bytes for the bodies of all its requests, and a client's seconds to send one.
BODY_BUDGET_BYTES, BODY_TIMEOUT_S = 256 * 1024 * 1024, 60.0
# Bytes of answers that may wait in a gateway for clients which do not read: for one, and for all.
MAX_UNREAD_BYTES, UNREAD_BUDGET_BYTES = 8 * MIB, 256 * MIB
# Lines of one batch that are asked at once, until more is known.
BATCH_LINES_IN_FLIGHT = 64
# How long the head of a stream waits for its first output, and how long a stream is silent after
# that. Proxies end a connection that is silent, nginx and AWS's load balancers after 60 s.
HEAD_AFTER_S = COMMENT_EVERY_S = 10.0
# How long a busy gateway may hold tokens back, to send those of a stream together.
MAX_HOLD_S = 0.1
# How often each end of a token link sends a sign of life, and when its silence ends the link.
HEARTBEAT_INTERVAL_S = 0.25
HEARTBEAT_TIMEOUT_S = 1.0
# How often an engine host tells a gateway what the engine has done, with the next sign of life.
STATS_INTERVAL_S = 1.0
# How long an engine host waits for a silent gateway. One that has ended is known by its connection;
# to give up one that only stood still costs all of its streams a new prefill.
GATEWAY_TIMEOUT_S = 30.0
# Bytes that a gateway may leave unread before its engine host gives it up.
MAX_BUFFERED_BYTES = 8 * MIB
# How often an engine is checked, and how long it may go without an answer: it gives one between two
# steps. On CPUs a long prefill is one step of seconds; on TPUs a program that the warm-up missed is
# compiled within one, for up to a minute or so.
CHECK_PERIOD_S = 1.0
PACED_HANG_TIMEOUT_S, CPU_HANG_TIMEOUT_S, TPU_HANG_TIMEOUT_S = 4.0, 20.0, 120.0
# How long an engine may take from its first process until it takes requests: weights of hundreds of
# GiB and programs that nobody has compiled before are well within the second, which is a guess.
CPU_START_TIMEOUT_S, TPU_START_TIMEOUT_S = 1800.0, 7200.0
# How long the probe of a slice may take.
PROBE_TIMEOUT_S = 120.0
# How long an engine goes on without a control process, and how long after one has left in order.
ENGINE_LEASE_S = 3600.0
ENGINE_HANDOVER_S = 600.0
# How long its replica waits for an engine host that does not answer, and has not ended.
ENGINE_SILENCE_S = 60.0

# Of the time that a draining engine has left, this share is kept to migrate what did not finish.
_MIGRATION_SHARE = 0.25
_MIN_MIGRATION_S = 0.5


def migrate_by_s(now_s: float, grace_s: float) -> float:
    """Returns when the last request has to leave an engine that ends in `grace_s` seconds."""
    return now_s + max(0.0, grace_s - max(_MIN_MIGRATION_S, grace_s * _MIGRATION_SHARE))


class LinkEncryption(StrEnum):
    """When links, and the streams from hosts' agents, are encrypted."""

    AUTO = "auto"  # wherever the end that accepts listens on anything but loopback
    TLS = "tls"  # on loopback too
    NONE = "none"  # never: whoever runs the network, such as a mesh, is in charge of it


def needs_tls(encryption: LinkEncryption, host: str) -> bool:
    """Returns whether connections to an end that listens on `host` (an address) are encrypted."""
    if encryption is not LinkEncryption.AUTO:
        return encryption is LinkEncryption.TLS
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
