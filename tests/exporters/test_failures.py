"""What the exporter reports of each fault: the table of docs/operate/tpu-exporter.md, by row."""

import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from libtpu_fake import (
    BANDWIDTH,
    DUTY,
    EXECUTION,
    HBM_USED,
    FakeLibtpu,
    by_device,
    distribution,
    gauge,
    metric,
    of_program,
    several,
)
from scrapes import FixedCollector, bus, exporter, scrape

from serving.exporters.collector import CollectError, PciBus
from serving.exporters.host_sources import PluginCollector, PodCollector, WorkloadCollector
from serving.exporters.libtpu_service.client import LibtpuCollector
from serving.exporters.libtpu_service.sdk import SdkChild, SdkCollector
from serving.exporters.scrape import Exporter

DOCUMENT = Path(__file__).parents[2] / "docs/operate/tpu-exporter.md"


@pytest.fixture
def fake() -> Iterator[FakeLibtpu]:
    server = FakeLibtpu().start()
    yield server
    server.stop()


def of_host(fake: FakeLibtpu, budget_s: float = 20.0) -> Exporter:
    """An exporter of a host with four v6e chips. What hangs takes it the budget."""
    pci = FixedCollector("pci", bus())
    return exporter(LibtpuCollector(fake.target), pci, budget_s=budget_s)


def test_healthy_runtime_gives_every_chip_and_no_error(fake: FakeLibtpu) -> None:
    seen = scrape(of_host(fake))
    assert seen.by("chip", "tpu_duty_cycle_ratio") == dict.fromkeys("0123", 0.875)
    assert seen.value("tpu_chips_reporting", source="libtpu") == 4
    assert (seen.success("libtpu"), seen.errors("libtpu")) == (1, {})


def test_refused_runtime_is_unavailable_and_shows_no_value(fake: FakeLibtpu) -> None:
    fake.stop()
    seen = scrape(of_host(fake))
    assert (seen.success("libtpu"), seen.errors("libtpu")) == (0, {"UNAVAILABLE": 1})
    assert seen.all("tpu_duty_cycle_ratio") == seen.all("tpu_chips_reporting") == []
    assert seen.value("tpu_chips_detected") == 4


def test_hung_runtime_costs_the_budget_and_no_other_collector(fake: FakeLibtpu) -> None:
    fake.faults.hangs = True
    seen = scrape(of_host(fake, budget_s=1.5))
    assert not fake.faults.release.is_set(), "the scrape ended while the runtime still hung"
    assert (seen.success("libtpu"), seen.errors("libtpu")) == (0, {"DEADLINE_EXCEEDED": 1})
    assert seen.all("tpu_duty_cycle_ratio") == []
    assert seen.value("tpu_chips_detected") == 4


def test_hung_collector_is_not_asked_again_and_reported_at_once() -> None:
    class Stuck:
        name, target = "stuck", ""

        def __init__(self) -> None:
            self.num_calls = 0
            self.release = threading.Event()

        def collect(self, timeout_s: float) -> PciBus:
            self.num_calls += 1
            self.release.wait()
            return bus()

    stuck = Stuck()
    source = exporter(stuck, budget_s=0.1)
    for _ in range(3):
        seen = scrape(source)
    assert stuck.num_calls == 1
    assert seen.errors("stuck") == {"DEADLINE_EXCEEDED": 3}
    stuck.release.set()


def test_half_of_the_metrics_failing_is_partial_and_the_rest_is_served(fake: FakeLibtpu) -> None:
    names = sorted(fake.metrics())
    fake.faults.failing = dict.fromkeys(set(names) - {DUTY, BANDWIDTH}, grpc.StatusCode.INTERNAL)
    seen = scrape(of_host(fake))
    assert (seen.success("libtpu"), seen.errors("libtpu")) == (0, {"PARTIAL": 1})
    assert len(seen.all("tpu_duty_cycle_ratio")) == 4
    assert seen.all("tpu_hbm_used_bytes") == []


@pytest.mark.slow
def test_half_of_the_metrics_hanging_is_partial_and_the_rest_is_served(fake: FakeLibtpu) -> None:
    fake.faults.hanging = set(fake.metrics()) - {DUTY, BANDWIDTH}
    # The half that answers has to be in time on a machine with much other work.
    seen = scrape(of_host(fake, budget_s=6.0))
    assert seen.errors("libtpu") == {"PARTIAL": 1}
    assert len(seen.all("tpu_duty_cycle_ratio")) == 4
    assert seen.all("tpu_hbm_used_bytes") == []


def test_all_metrics_failing_is_the_code_that_they_fail_with(fake: FakeLibtpu) -> None:
    fake.faults.failing = dict.fromkeys(fake.metrics(), grpc.StatusCode.INTERNAL)
    seen = scrape(of_host(fake))
    assert seen.errors("libtpu") == {"INTERNAL": 1}
    assert seen.success("libtpu") == 0


def test_old_libtpu_without_the_service_is_unimplemented(fake: FakeLibtpu) -> None:
    fake.faults.code = grpc.StatusCode.UNIMPLEMENTED
    assert scrape(of_host(fake)).errors("libtpu") == {"UNIMPLEMENTED": 1}


def test_missing_chip_is_fewer_reporting_than_expected_and_renames_no_other() -> None:
    fake = FakeLibtpu((404, 405, 412, 413)).start()
    source = of_host(fake)
    scrape(source)
    fake.faults.missing_devices = {405}
    seen = scrape(source)
    fake.stop()
    assert seen.by("chip", "tpu_duty_cycle_ratio").keys() == {"0", "2", "3"}
    assert seen.value("tpu_chips_reporting", source="libtpu") == 3
    assert seen.value("tpu_chips_expected") == 4
    # The alert on a missing chip asks for a collector that succeeds.
    assert seen.success("libtpu") == 1


def test_missing_chip_from_the_start_leaves_ids_that_nobody_can_rank() -> None:
    fake = FakeLibtpu((404, 405, 412)).start()
    seen = scrape(of_host(fake))
    fake.stop()
    assert seen.by("device_id", "tpu_duty_cycle_ratio").keys() == {"404", "405", "412"}
    assert seen.by("chip", "tpu_duty_cycle_ratio", device_id="404").keys() == {""}
    assert seen.value("tpu_chips_reporting", source="libtpu") == 3


def test_eight_devices_against_four_chips_are_shown_by_device_and_fail() -> None:
    fake = FakeLibtpu(range(8)).start()
    seen = scrape(of_host(fake))
    fake.stop()
    assert (seen.success("libtpu"), seen.errors("libtpu")) == (0, {"CHIP_COUNT": 1})
    assert seen.by("device_id", "tpu_duty_cycle_ratio").keys() == set("01234567")
    assert all(
        "chip" not in dict(one_series.labels) for one_series in seen.all("tpu_duty_cycle_ratio")
    )


def test_wrong_types_drop_the_samples_and_nothing_else(fake: FakeLibtpu) -> None:
    fake.faults.overrides = {
        DUTY: [by_device(device, gauge("busy")) for device in range(4)],
        HBM_USED: [metric(several("device-id", id=1), **gauge(1))],
        EXECUTION: [metric(of_program(0), **gauge(1))],
    }
    seen = scrape(of_host(fake))
    assert seen.errors("libtpu") == {"BAD_VALUE": 4, "BAD_ATTRIBUTE": 1, "BAD_DISTRIBUTION": 1}
    assert seen.success("libtpu") == 0
    assert {"tpu_duty_cycle_ratio", "tpu_hbm_used_bytes"}.isdisjoint(seen.names)
    assert len(seen.all("tpu_hbm_capacity_bytes")) == 4


@pytest.mark.parametrize("percent", [float("nan"), float("inf"), -1.0, 105.5])
def test_impossible_value_is_dropped_never_clamped(fake: FakeLibtpu, percent: float) -> None:
    fake.faults.overrides = {
        DUTY: [by_device(0, gauge(percent)), by_device(1, gauge(104.0)), by_device(2, gauge(0.0))]
    }
    seen = scrape(of_host(fake))
    assert seen.by("chip", "tpu_duty_cycle_ratio") == {"1": 1.04, "2": 0.0}
    assert seen.errors("libtpu") == {"BAD_VALUE": 1}


def test_histogram_that_contradicts_itself_is_dropped(fake: FakeLibtpu) -> None:
    fake.faults.overrides = {
        EXECUTION: [
            metric(of_program(0), **distribution([0, 1, 5, 0], 100.0, 5.0, count=7)),
            metric(of_program(1), **distribution([0, 1, 5, 0], 100.0, 5.0)),
        ]
    }
    seen = scrape(of_host(fake))
    assert len(seen.all("tpu_hlo_execution_seconds", chip="1")) == 1
    assert seen.all("tpu_hlo_execution_seconds", chip="0") == []
    assert seen.errors("libtpu") == {"BAD_DISTRIBUTION": 1}


def test_two_values_for_one_series_keep_the_first(fake: FakeLibtpu) -> None:
    fake.faults.overrides = {DUTY: [by_device(0, gauge(10.0)), by_device(0, gauge(20.0))]}
    seen = scrape(of_host(fake))
    assert seen.by("chip", "tpu_duty_cycle_ratio") == {"0": 0.1}
    assert seen.errors("libtpu") == {"CONFLICT": 1}


def test_more_label_sets_than_the_registry_allows_are_dropped(fake: FakeLibtpu) -> None:
    names = [f"core-{number}" for number in range(5)]
    fake.faults.overrides = {
        "hlo.queue.size.gauge": [
            metric(several("hlo", device_ordinal="0", core_type=name), **gauge(1)) for name in names
        ]
    }
    seen = scrape(of_host(fake))
    assert seen.by("core_type", "tpu_hlo_queue_length").keys() == {"core-0", "core-1"}
    assert seen.errors("libtpu") == {"LABEL_LIMIT": 3}


def test_runtime_that_answers_without_values_is_empty(fake: FakeLibtpu) -> None:
    fake.faults.is_empty = True
    seen = scrape(of_host(fake))
    assert (seen.success("libtpu"), seen.errors("libtpu")) == (0, {"EMPTY": 1})


def test_runtime_back_after_an_outage_is_seen_by_the_next_scrape(fake: FakeLibtpu) -> None:
    source = of_host(fake)
    assert scrape(source).success("libtpu") == 1
    fake.stop()
    # As many failures as a back-off needs to grow; how long they took makes no difference, because
    # a channel that failed is not used again.
    for _ in range(5):
        seen = scrape(source)
        assert (seen.success("libtpu"), seen.all("tpu_duty_cycle_ratio")) == (0, [])
    fake.faults.release.clear()
    fake.start()
    seen = scrape(source)
    assert seen.success("libtpu") == 1
    assert len(seen.all("tpu_duty_cycle_ratio")) == 4
    assert seen.errors("libtpu") == {"UNAVAILABLE": 5}


def test_runtime_that_no_longer_hangs_is_seen_by_the_next_scrape(fake: FakeLibtpu) -> None:
    fake.faults.hanging = {DUTY}
    source = of_host(fake)
    assert scrape(source, budget_s=0.5).all("tpu_duty_cycle_ratio") == []
    fake.faults.hanging = set()
    assert len(scrape(source).all("tpu_duty_cycle_ratio")) == 4


def test_crash_of_a_collector_is_its_own_code_and_takes_no_other_along(fake: FakeLibtpu) -> None:
    class Broken:
        name, target = "broken", ""

        def collect(self, timeout_s: float) -> None:
            raise ZeroDivisionError

    seen = scrape(exporter(Broken(), LibtpuCollector(fake.target)))
    assert seen.errors("broken") == {"CRASHED": 1}
    assert seen.success("libtpu") == 1


class PluginPages:
    """A device plugin that answers with this status and body; a body of `None` never comes."""

    def __init__(self, status: int, body: bytes | None) -> None:
        self.release = release = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if body is None:
                    release.wait()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.target = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (500, b"", "UNREADABLE"),
        (200, b"\xff\xfe", "UNREADABLE"),
        (200, b"tensorcore_utilization_node{ 5\n", "UNREADABLE"),
        (200, b"# nothing\n", "EMPTY"),
        (200, None, "DEADLINE_EXCEEDED"),
    ],
)
def test_device_plugin_without_a_page_fails_alone(status: int, body: bytes, code: str) -> None:
    pages = PluginPages(status, body)
    source = exporter(PluginCollector(pages.target), FixedCollector("pci", bus()))
    seen = scrape(source, budget_s=1.5 if body is None else 20.0)
    pages.close()
    assert seen.success("device_plugin") == 0
    assert code in seen.errors("device_plugin")
    assert seen.value("tpu_chips_detected") == 4


def test_refused_device_plugin_is_unavailable() -> None:
    pages = PluginPages(200, b"")
    pages.close()
    seen = scrape(exporter(PluginCollector(pages.target)))
    assert seen.errors("device_plugin") == {"UNAVAILABLE": 1}


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import os; os.kill(os.getpid(), 11)", "CRASHED"),
        ("import sys; sys.stdin.read()", "DEADLINE_EXCEEDED"),
        ("input(); print('@[1]', flush=True); input()", "UNREADABLE"),
    ],
)
def test_sdk_child_that_fails_is_killed_and_says_why(program: str, code: str) -> None:
    child = SdkChild((sys.executable, "-c", program))
    with pytest.raises(CollectError) as caught:
        child.ask(timeout_s=0.5 if code == "DEADLINE_EXCEEDED" else 30.0)
    assert caught.value.code == code


def test_sdk_sample_is_served_with_its_age_and_dropped_after_two_intervals() -> None:
    now = [1000.0]
    program = (
        'import sys\nfor _ in sys.stdin: print(\'noise\\n@{"tpu_throttle_score": ["1-3"]}\','
        " flush=True)"
    )
    child = SdkChild((sys.executable, "-c", program))
    sdk = SdkCollector(child, interval_s=60.0, clock=lambda: now[0])
    source = exporter(sdk, FixedCollector("pci", bus()))
    assert scrape(source).all("tpu_throttle_ratio") == []
    sdk.poll()
    child.close()
    now[0] += 119.0
    seen = scrape(source)
    assert seen.by("chip", "tpu_throttle_ratio") == {"1": 0.3}
    assert seen.value("tpu_host_sample_age_seconds") == 119.0
    now[0] += 1.0
    seen = scrape(source)
    assert seen.all("tpu_throttle_ratio") == seen.all("tpu_host_sample_age_seconds") == []


def test_sdk_that_keeps_failing_is_asked_ever_more_rarely() -> None:
    sdk = SdkCollector(SdkChild(("/nonexistent/python",)))
    assert [sdk.poll() for _ in range(10)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert scrape(exporter(sdk)).errors("sdk") == {"CRASHED": 1}


def test_host_without_a_kubelet_or_workloads_has_nothing_wrong(tmp_path: Path) -> None:
    pods = PodCollector(tmp_path / "kubelet.sock")
    seen = scrape(exporter(pods, WorkloadCollector(tmp_path)))
    assert seen.success("pod_resources") == seen.success("workloads") == 1


def test_workload_file_that_is_none_is_counted(tmp_path: Path) -> None:
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "1.json").write_text('{"pid": 1, "unknown": 2}')
    seen = scrape(exporter(WorkloadCollector(tmp_path)))
    assert seen.errors("workloads") == {"UNREADABLE": 1}


def test_every_row_of_the_documented_table_names_a_test_that_is_here() -> None:
    rows = re.findall(r"^\|.*\| `(test_\w+)` \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) >= 20
    assert [row for row in rows if row not in globals()] == []
