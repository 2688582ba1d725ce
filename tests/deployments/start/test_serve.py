"""The environment of a cluster on this machine."""

from deployments.start.serve import child_environment
from serving.config.ray_settings import HARD_STOP


def test_ports_last_for_a_gateway_killed_every_minute_until_haproxys_hard_stop() -> None:
    environment = child_environment({}, "/tmp/x")
    first = int(environment["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"])
    end = int(environment["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"])
    # Serve keeps the port of an ended gateway back until 30 s after the hard stop.
    assert end - first > (int(environment[HARD_STOP]) + 30) / 60


def test_own_variables_win_over_ours_but_not_over_the_clusters_place() -> None:
    environment = child_environment({HARD_STOP: "300", "RAY_TMPDIR": "/elsewhere"}, "/tmp/x")
    assert (environment[HARD_STOP], environment["RAY_TMPDIR"]) == ("300", "/tmp/x")
