"""A real Prometheus at 1 s watches a simulated fleet lose slices: the right alerts, and no others.

The rules are the shipped ones with their windows and waits shortened by code (`scaled`).
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.exporters.libtpu_service.client import LibtpuCollector
from serving.exporters.server import ExporterServer
from tests.e2e.application import RunningApplication, application_args, linked_engines, paced_model
from tests.e2e.streams import Request, stream_all

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "exporters")]

from libtpu_fake import FakeLibtpu  # noqa: E402
from observing import Observing  # noqa: E402
from scaled import write_scaled  # noqa: E402
from scrapes import FixedCollector, bus, exporter  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.needs("prometheus"),
]

MODEL = "paced"
SHAPE = {"generation": "v6e", "topology": "2x2"}
NUM_CHIPS = 4
NUM_SLICES = 4
NUM_STREAMS = 12
# Half an hour becomes a minute, and waits of minutes become seconds.
FACTOR = 30.0
DEADLINE_S = 120.0
# Five Ray nodes and four engines, on a machine that may have other work.
START_TIMEOUT_S = 400.0
PLAN = {
    "slices": [
        {
            "name": "spot",
            "compute_class": "spot",
            "count": NUM_SLICES,
            "chips_per_host": NUM_CHIPS,
            "returns_after_s": 5,
            **SHAPE,
        }
    ]
}


@dataclass
class Stage:
    """All that runs."""

    application: RunningApplication
    libtpu: FakeLibtpu
    prometheus: Observing

    def page(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """The gateway's page: values by name and labels."""
        text = httpx.get(f"{self.application.base_url}/metrics", verify=False).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def alerts(self) -> set[str]:
        """The alerts that fire now."""
        found = self.prometheus.query('ALERTS{alertstate="firing"}')
        return {each["metric"]["alertname"] for each in found}

    def annotations(self) -> dict[str, dict[str, str]]:
        """What the alerts of now say, by their names."""
        found = self.prometheus.get("alerts")["alerts"]
        return {each["labels"]["alertname"]: each["annotations"] for each in found}

    def ever_fired(self) -> set[str]:
        """The alerts that have fired since the start."""
        found = self.prometheus.query('max_over_time(ALERTS{alertstate="firing"}[1h])')
        return {each["metric"]["alertname"] for each in found}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("observed")
    deployment = {
        "compute_class": "spot",
        "replicas": NUM_SLICES,
        "num_cpus": 0.01,
        "slice": SHAPE | {"chips_per_host": NUM_CHIPS},
    }
    pace = {"ttft_ms": 20.0, "tpot_ms": 40.0}
    args = application_args(paced_model(pace=pace, deployments=[deployment]))
    with ExitStack() as stack:
        libtpu = FakeLibtpu().start()
        stack.callback(libtpu.stop)
        address = stack.enter_context(running_exporter(libtpu.target))
        application = RunningApplication(args, through="sim", plan=PLAN)
        stack.callback(application.stop)
        application.launch()
        application.wait_ready(START_TIMEOUT_S)
        arguments = [
            *("--gateway", application.base_url, "--tpu-exporter", address),
            *("--config-dir", str(write_scaled(folder / "rules", FACTOR))),
            *("--scrape-interval", "1"),
        ]
        (ray_file,) = application.folder.glob("sw-*/ray/prom_metrics_service_discovery.json")
        prometheus = Observing(folder / "tmp", [*arguments, "--ray-discovery", str(ray_file)])
        yield Stage(application, libtpu, stack.enter_context(prometheus))


@contextmanager
def running_exporter(target: str) -> Iterator[str]:
    """A TPU exporter over the fake runtime and a PCI bus with its chips; its address.

    Its slice is none of the fleet's: the fake's chips are always busy, which beside an idle engine
    is a fault that `TpuBusyWithoutTraffic` is for.
    """
    host = {"SLICEWISE_SLICE": "elsewhere", "SLICEWISE_NODE": "node-1", "TPU_TOPOLOGY": "2x2"}
    source = exporter(
        LibtpuCollector(target),
        FixedCollector("pci", bus(NUM_CHIPS)),
        environment=host,
        budget_s=0.5,
        expected_chips=NUM_CHIPS,
    )
    server = ExporterServer(source, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wait_until(is_so: Callable[[], bool], what: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.5)


def test_preemptions_fire_their_alert_and_no_other_and_the_numbers_agree(stage: Stage) -> None:
    application, prometheus = stage.application, stage.prometheus
    jobs = {"gateway", "tpu-exporter", "ray"}
    up = 'count by (job) (up{job=~"gateway|tpu-exporter|ray"} == 1)'
    wait_until(
        lambda: {each["metric"]["job"] for each in prometheus.query(up)} == jobs, stage.alerts
    )
    ready = "model:slices_ready:count"
    wait_until(lambda: prometheus.value(ready) == NUM_SLICES, lambda: prometheus.query(ready))
    # A quiet fleet for as long as the longest short wait.
    seen = "count_over_time(model:slices_ready:count[1h])"
    wait_until(lambda: (prometheus.value(seen) or 0) >= 25, lambda: prometheus.query(seen))
    assert stage.ever_fired() == set()

    asyncio.run(under_preemptions(stage))

    wait_until(lambda: "SpotLoss" in stage.alerts(), stage.ever_fired)
    spoken = stage.annotations()["SpotLoss"]
    assert spoken["summary"] == "spot loses its slices"
    assert "slices of spot were taken away" in spoken["description"]
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: NUM_SLICES}, 120.0)
    # It is over once its half hour is, which is a minute here.
    wait_until(lambda: "SpotLoss" not in stage.alerts(), stage.alerts)
    assert stage.ever_fired() == {"SpotLoss"}
    assert_numbers_agree(stage)


async def under_preemptions(stage: Stage) -> None:
    """Three of four slices are preempted under streams, which all end whole."""
    body = {
        "model": MODEL,
        "prompt": "A slice is",
        "max_tokens": 300,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    requests = [Request("/v1/completions", body) for _ in range(NUM_STREAMS)]
    begun: set[int] = set()
    all_begun = asyncio.Event()

    def on_chunk(number: int, _: object) -> None:
        begun.add(number)
        if len(begun) == NUM_STREAMS:
            all_begun.set()

    task = asyncio.create_task(stream_all(stage.application.base_url, requests, on_chunk))
    await all_begun.wait()
    for number in range(3):
        await asyncio.to_thread(
            stage.application.simulation,
            "preempt",
            name=f"spot-{number}",
            notice_s=2.0,
            worker_id=0,
        )
    answers = await task
    assert [answer.error for answer in answers] == [None] * NUM_STREAMS
    lengths = [len(answer.choices[0].token_ids) for answer in answers]
    assert lengths == [300] * NUM_STREAMS


def assert_numbers_agree(stage: Stage) -> None:
    """What stands still is the same; what grows lies between two looks at the page."""
    prometheus = stage.prometheus
    before = stage.page()
    time.sleep(2.5)  # two scrapes: what Prometheus has is younger than `before`
    names = (
        "slicewise_resumes_total",
        "slicewise_slices_ended_total",
        "slicewise_ledger_chip_seconds_total",
        "slicewise_ledger_chips",
        "slicewise_resume_stall_seconds_count",
    )
    read = {
        (name, tuple(sorted(labels_of(each["metric"]).items()))): float(each["value"][1])
        for name in names
        for each in prometheus.query(name)
    }
    after = stage.page()
    assert {key for key in before if key[0] in names} == set(read)
    for key, value in read.items():
        assert before[key] <= value <= after[key], key
    moved = sum(value for (name, _), value in read.items() if name == "slicewise_resumes_total")
    assert moved > 0
    ends = 'max by (cause) (slicewise_slices_ended_total{cause="preempted"})'
    assert prometheus.value(ends) == 3
    chips = "sum(max by (state) (slicewise_ledger_chips))"
    assert prometheus.value(chips) == NUM_SLICES * NUM_CHIPS


def labels_of(metric: dict[str, str]) -> dict[str, str]:
    own = ("__name__", "job", "instance", "host")  # Prometheus adds them
    return {k: v for k, v in metric.items() if k not in own}


def test_runtime_that_hangs_fires_its_alert_alone(stage: Stage) -> None:
    stage.libtpu.faults.hangs = True
    before = stage.ever_fired()
    wait_until(lambda: "TpuRuntimeHung" in stage.alerts(), stage.ever_fired)
    stage.libtpu.faults.hangs = False
    stage.libtpu.faults.release.set()
    wait_until(lambda: "TpuRuntimeHung" not in stage.alerts(), stage.alerts)
    assert stage.ever_fired() - before == {"TpuRuntimeHung"}
