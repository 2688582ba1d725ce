"""`slicewise observe`: what Prometheus is told, and what a user is told."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from shipped import PROMETHEUS, ROOT
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.observe.prometheus import (
    Settings,
    TargetError,
    configure,
    gateway_targets,
    plain_targets,
)

SHIPPED = yaml.safe_load((PROMETHEUS / "laptop.yml").read_text())
DEADLINE_S = 60.0


def test_configuration_is_the_shipped_one_with_our_files() -> None:
    config = configure(SHIPPED, Settings((Path("/r/a.rules.yml"),), Path("/t")))
    assert config["rule_files"] == ["/r/a.rules.yml"]
    assert config["global"] == SHIPPED["global"]
    files = {
        job["job_name"]: job["file_sd_configs"][0]["files"] for job in config["scrape_configs"]
    }
    assert files == {name: [f"/t/{name}.json"] for name in ("gateway", "tpu-exporter", "ray")}
    assert not any("authorization" in job for job in config["scrape_configs"])


def test_key_goes_to_the_gateways_alone() -> None:
    config = configure(SHIPPED, Settings((), Path("/t"), key_file=Path("/k")))
    keyed = {job["job_name"]: job.get("authorization") for job in config["scrape_configs"]}
    assert keyed == {"gateway": {"credentials_file": "/k"}, "tpu-exporter": None, "ray": None}


def test_interval_is_that_of_scrapes_and_alerts_and_leaves_room_for_the_timeout() -> None:
    config = configure(SHIPPED, Settings((), Path("/t"), interval_s=1.0))
    assert config["global"] == {
        "scrape_interval": "1000ms",
        "scrape_timeout": "800ms",
        "evaluation_interval": "1000ms",
    }


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "/metrics"),
        ("https://gate.example/llm/", "gate.example:443", "/llm/metrics"),
        ("http://[::1]:8000", "[::1]:8000", "/metrics"),
    ],
)
def test_address_of_a_gateway_becomes_a_target(url: str, target: str, path: str) -> None:
    (group,) = json.loads(gateway_targets([url]))
    assert group["targets"] == [target]
    assert group["labels"]["__metrics_path__"] == path
    assert group["labels"]["__scheme__"] == url.partition(":")[0]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://u@a"]
)
def test_what_is_no_address_of_a_gateway_is_refused_with_what_is(url: str) -> None:
    with pytest.raises(TargetError, match=re.escape(f"{url!r}; allowed: such as http://")):
        gateway_targets([url])


@pytest.mark.parametrize("address", ["a", "a:0", "a:b", ":1", "http://a:1", "a:1/x"])
def test_what_is_no_address_of_an_exporter_is_refused(address: str) -> None:
    with pytest.raises(TargetError, match="allowed: such as"):
        plain_targets([address])


def test_no_target_is_an_empty_list() -> None:
    assert json.loads(plain_targets([])) == []


def test_without_prometheus_the_user_is_told_how_to_get_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(build_cli(()), ["observe"], env={"PATH": str(tmp_path)})
    assert done.exit_code == 1
    assert "apt-get install --no-install-recommends prometheus" in done.output


@pytest.mark.process
@pytest.mark.needs("prometheus")
def test_prometheus_runs_with_our_rules_and_ends_with_the_command(tmp_path: Path) -> None:
    ray = tmp_path / "ray.json"
    ray.write_text('[{"labels": {"job": "ray"}, "targets": ["127.0.0.1:1"]}]')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(Path(sys.executable).with_name("slicewise")), "observe", "--port", f"{port}"),
        *("--gateway", "http://127.0.0.1:2", "--tpu-exporter", "127.0.0.1:3"),
        *("--ray-discovery", str(ray), "--scrape-interval", "0.5"),
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path), "SLICEWISE_API_KEY": "sk-secret"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            told = [child.stdout.readline() for _ in range(4)]
            api = f"http://127.0.0.1:{port}/api/v1"
            groups = httpx.get(f"{api}/rules", verify=False).json()["data"]["groups"]
            files = (PROMETHEUS / "rules").glob("*.rules.yml")
            shipped = [yaml.safe_load(each.read_text())["groups"] for each in files]
            assert len(groups) == sum(map(len, shipped))
            wanted = {"gateway", "tpu-exporter", "ray"}
            deadline_s = time.monotonic() + DEADLINE_S
            while wanted != {
                each["labels"]["job"]
                for each in httpx.get(f"{api}/targets", verify=False).json()["data"][
                    "activeTargets"
                ]
            }:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            assert f"http://127.0.0.1:{port}" in told[0]
            assert "http://127.0.0.1:2" in told[1]
            (key,) = tmp_path.glob("sw-prom-*/api-key")
            assert key.stat().st_mode & 0o777 == 0o600
        finally:
            child.send_signal(signal.SIGINT)
            code = child.wait(DEADLINE_S)
    assert code == 0
    assert list(tmp_path.glob("sw-prom-*")) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(api, verify=False)
