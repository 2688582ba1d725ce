"""The exporter over HTTP, as Prometheus, Ray and a person with a capture meet it."""

import gzip
import http.client
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from libtpu_fake import FakeLibtpu
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from scrapes import V6E_HOST, FixedCollector, bus, exporter

from serving.domain.errors import ConfigError
from serving.exporters.capture import read_capture, write_capture
from serving.exporters.collector import WorkloadFiles
from serving.exporters.libtpu_service.client import LibtpuCollector
from serving.exporters.scrape import Exporter
from serving.exporters.server import (
    DEVICE_PLUGIN_PATH,
    METRICS_PATH,
    ExporterServer,
    budget_s,
)
from serving.telemetry.metric_names import ALL


@pytest.fixture
def fake() -> Iterator[FakeLibtpu]:
    server = FakeLibtpu((404, 405, 412, 413)).start()
    yield server
    server.stop()


@contextmanager
def serving(source: Exporter) -> Iterator[int]:
    server = ExporterServer(source, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Content-Type"], body


def test_page_is_valid_and_has_only_names_and_kinds_of_the_registry(fake: FakeLibtpu) -> None:
    with serving(exporter(LibtpuCollector(fake.target), FixedCollector("pci", bus()))) as port:
        status, _, body = get(port, METRICS_PATH)
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(body)}
    ours = {name: family for name, family in families.items() if name.startswith("tpu_")}
    stems = {name.removesuffix("_total"): metric for name, metric in ALL.items()}
    assert {name: family.type for name, family in ours.items()} == {
        name: stems[name].kind for name in ours
    }
    assert "process_resident_memory_bytes" in families
    assert "libtpu's tpu.runtime.tensorcore.dutycycle.percent" in body


def test_openmetrics_is_spoken_if_asked_for(fake: FakeLibtpu) -> None:
    with serving(exporter(LibtpuCollector(fake.target))) as port:
        _, content_type, body = get(port, METRICS_PATH, Accept="application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text")
    assert "tpu_dcn_tcp_bytes_sent" in {family.name for family in read_openmetrics(body)}


def test_page_is_there_when_every_source_is_gone(fake: FakeLibtpu) -> None:
    fake.stop()
    with serving(exporter(LibtpuCollector(fake.target))) as port:
        assert get(port, METRICS_PATH)[0] == get(port, DEVICE_PLUGIN_PATH)[0] == 200
        assert get(port, "/healthz")[2] == "ok\n"
        assert get(port, "/elsewhere")[0] == 404


def test_more_scrapes_at_a_time_than_there_is_room_for_are_refused() -> None:
    release = threading.Event()

    class Slow:
        name, target = "slow", ""

        def collect(self, timeout_s: float) -> None:
            release.wait()

    with serving(exporter(Slow(), budget_s=60.0)) as port:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(11)]
        for connection in connections:
            connection.request("GET", METRICS_PATH)
        sockets = [connection.sock for connection in connections]
        # The others are answered only after the release.
        while len(select.select(sockets, [], [], 60)[0]) < 3:
            pass
        release.set()
        statuses = sorted(connection.getresponse().status for connection in connections)
        for connection in connections:
            connection.close()
    assert statuses == [200] * 8 + [503] * 3


def test_page_is_compressed_for_a_reader_who_takes_it_so() -> None:
    with serving(exporter(FixedCollector("pci", bus()))) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", METRICS_PATH, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = gzip.decompress(answer.read()).decode()
        connection.close()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert "tpu_chips_detected" in body


@pytest.mark.parametrize("request_line", [b"\r\n", b"nonsense\r\n\r\n", b"GET /" + b"a" * 70_000])
def test_bad_clients_and_those_that_leave_take_nothing_from_the_next(request_line: bytes) -> None:
    with serving(exporter(FixedCollector("pci", bus()))) as port:
        clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(20)]
        for client in clients:
            client.sendall(request_line)
        assert get(port, METRICS_PATH)[0] == 200
        for client in clients:
            client.close()
        assert get(port, METRICS_PATH)[0] == 200


@pytest.mark.parametrize("query", ["", "?name[]=elsewhere", "?%gg"])
def test_page_is_whole_whatever_the_query_says(query: str) -> None:
    with serving(exporter(FixedCollector("pci", bus()))) as port:
        status, _, body = get(port, f"{METRICS_PATH}{query}")
    assert status == 200
    assert "tpu_chips_detected" in body


@pytest.mark.parametrize(
    ("header", "expected"),
    [("10", 8.0), (None, None), ("", None), ("soon", None), ("nan", None), ("-1", None)],
)
def test_budget_is_what_prometheus_grants(header: str | None, expected: float | None) -> None:
    assert budget_s(header) == expected


@pytest.mark.slow
def test_rays_own_parser_reads_the_compatible_page(fake: FakeLibtpu) -> None:
    # It takes a second to import.
    agent = importlib.import_module("ray.dashboard.modules.reporter.reporter_agent")
    with serving(exporter(LibtpuCollector(fake.target), FixedCollector("pci", bus()))) as port:
        agent.TPU_DEVICE_PLUGIN_ADDR = f"127.0.0.1:{port}/compat/gke-device-plugin"
        agent.enable_tpu_usage_check = True
        chips = agent.ReporterAgent._get_tpu_usage()
    names = ("index", "duty_cycle", "hbm_utilization", "memory_used", "memory_total", "tpu_type")
    assert [[chip[name] for name in names] for chip in chips] == [
        [index, 87.5, 41.25, 18 * 2**30, 31 * 2**30, "tpu-v6e-slice"] for index in range(4)
    ]


def test_chips_of_two_devices_are_joined_for_ray() -> None:
    fake = FakeLibtpu(range(8)).start()
    environment = {"TPU_ACCELERATOR_TYPE": "tpu7x", "TPU_TOPOLOGY": "2x2x1"}
    with serving(exporter(LibtpuCollector(fake.target), environment=environment)) as port:
        body = get(port, DEVICE_PLUGIN_PATH)[2]
    fake.stop()
    samples = [
        sample for family in text_string_to_metric_families(body) for sample in family.samples
    ]
    used = {s.labels["accelerator_id"]: s.value for s in samples if s.name == "memory_used"}
    assert used == dict.fromkeys(("0-0", "0-1", "0-2", "0-3"), 2 * 18 * 2**30)


def test_a_capture_replayed_shows_the_same_values_without_names(
    fake: FakeLibtpu, tmp_path: Path
) -> None:
    refused = FakeLibtpu().start()
    refused.stop()
    collectors = (
        LibtpuCollector(fake.target),
        LibtpuCollector(refused.target),
        FixedCollector("pci", bus()),
        FixedCollector("workloads", WorkloadFiles(workloads=())),
    )
    source = exporter(*collectors)
    path = tmp_path / "capture.json"
    write_capture(path, source.collect(), source.facts, "1.2.3")
    text = path.read_text()
    assert not any(name in text for name in ("slice-0", "node-1", "v6e-spot", "workloads"))
    capture = read_capture(path)
    replayed = Exporter(capture.collectors(), capture.facts(), "1.2.3").scrape()
    names = {"slice", "node", "compute_class"}
    live = {
        (
            one_series.metric,
            tuple(pair for pair in one_series.labels if pair[0] not in names),
        ): one_series.value
        for one_series in source.scrape()
        if "scrape_collector" not in one_series.metric
    }
    again = {
        (one_series.metric, one_series.labels): one_series.value
        for one_series in replayed
        if "scrape_collector" not in one_series.metric
    }
    assert again == live
    assert any("UNAVAILABLE" in dict(one_series.labels).values() for one_series in replayed)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"format": 2}, "format"), ({"colour": "red"}, "colour"), ({"readings": [{}]}, "readings[0]")],
)
def test_a_file_that_is_no_capture_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    path = tmp_path / "capture.json"
    source = exporter(FixedCollector("pci", bus()))
    write_capture(path, source.collect(), source.facts, "1.2.3")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError) as caught:
        read_capture(path)
    assert any(complaint in problem.path for problem in caught.value.problems)


def run_command(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "serving.exporters", "--host", "127.0.0.1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **V6E_HOST, "COLUMNS": "200"},
    )


def test_the_command_serves_until_it_is_told_to_end(fake: FakeLibtpu) -> None:
    with run_command("--port", "0", "--libtpu", fake.target) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        body = get(port, METRICS_PATH)[2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert 'slice="slice-0"' in body
    assert body.count("\ntpu_duty_cycle_ratio{") == 4


def test_the_command_writes_a_capture_and_replays_it(fake: FakeLibtpu, tmp_path: Path) -> None:
    path = tmp_path / "capture.json"
    with run_command("--libtpu", fake.target, "--dump-raw", f"{path}") as process:
        assert process.wait(60) == 0
    fake.stop()
    with run_command("--port", "0", "--replay", f"{path}") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        body = get(port, METRICS_PATH)[2]
        process.terminate()
        process.wait(60)
    assert body.count("\ntpu_duty_cycle_ratio{") == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--libtpu", "nowhere"), "nowhere"),
        (("--device-plugin", "host:0"), "host:0"),
        (("--replay", "/nonexistent"), "/nonexistent"),
        (("--no-libtpu", "--libtpu", "a:1"), "exclude"),
    ],
)
def test_the_command_refuses_what_cannot_be_meant(
    arguments: tuple[str, ...], complaint: str
) -> None:
    with run_command("--port", "0", *arguments) as process:
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert complaint in process.stderr.read()


def test_importing_the_command_loads_no_framework_and_no_grpc() -> None:
    probe = (
        "import sys, serving.exporters.command as c;"
        "print(*{'ray', 'vllm', 'torch', 'jax', 'grpc', 'google.protobuf'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_running_exporter_loads_no_framework() -> None:
    probe = (
        "import sys, serving.exporters.service, serving.exporters.server;"
        "print(*{'ray', 'vllm', 'torch', 'jax', 'numpy', 'libtpu'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
