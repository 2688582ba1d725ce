"""What a simulated cluster has to be like to outlive its head."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.simulation.deployed import ensure_lasting, lasting_environment, proxy_url
from deployments.simulation.plan import parse_plan
from serving.config.check import check_serve_config
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[3] / "deployments" / "sim"
SPOT = {"name": "spot", "compute_class": "spot", "generation": "v6e", "topology": "1x1"}
LASTING = {"head_cpus": 0, "gateway_hosts": 1, "slices": [SPOT]}


def test_cluster_with_nothing_on_its_head_may_lose_it() -> None:
    # Ray Serve's own default is a proxy on every node.
    for settings in ({}, {"proxy_location": "EveryNode"}):
        ensure_lasting(parse_plan(LASTING), settings)


def test_shipped_files_are_such_a_cluster() -> None:
    plan = parse_plan(yaml.safe_load((SHIPPED / "lasting_cluster.yaml").read_text()))
    settings = yaml.safe_load((SHIPPED / "lasting.yaml").read_text())
    ensure_lasting(plan, settings)
    assert check_serve_config(settings, installed_vllm_args()).problems == ()


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({"gateway_hosts": 0}, {}, "gateway_hosts"),
        ({"head_cpus": 2}, {}, "head_cpus"),
        ({}, {"proxy_location": "HeadOnly"}, "proxy_location"),
    ],
)
def test_cluster_that_would_lose_its_application_is_refused(
    change: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ensure_lasting(parse_plan(LASTING | change), settings)
    assert [problem.path for problem in refused.value.problems] == [words]


def test_users_own_variables_win() -> None:
    ours = lasting_environment({}, 8123)
    assert proxy_url(ours) == "http://127.0.0.1:8123"
    assert float(ours["RAY_gcs_rpc_server_reconnect_timeout_s"]) > 60
    given = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5", "HOME": "/nowhere"}
    assert lasting_environment(given, 8123).items() >= given.items()
