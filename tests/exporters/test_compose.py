"""What a page shows: values, units, labels, owners, and which source wins."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from hypothesis import given
from hypothesis import strategies as st
from libtpu_fake import FakeLibtpu
from scrapes import FixedCollector, Scrape, bus, exporter, scrape, write_files

from serving.exporters.collector import AnnouncedWorkload, PluginPage, SdkValues, WorkloadFiles
from serving.exporters.host_sources import PciCollector, PodCollector, WorkloadCollector
from serving.exporters.libtpu_service.client import LibtpuCollector
from serving.exporters.series import HistogramValue, histogram, thinned
from serving.exporters.wire import POD_RESOURCES
from serving.telemetry.metric_names import HOST_LABELS

PLUGIN_LABELS = 'make="cloud-tpu",model="tpu-v6e-slice",tpu_topology="4x4"'


def plugin_page(**values: dict[int, float]) -> PluginPage:
    lines = [
        f'{name}{{accelerator_id="10-0-{index}",{PLUGIN_LABELS}}} {value}'
        for name, by_index in values.items()
        for index, value in by_index.items()
    ]
    return PluginPage(text="\n".join(["# TYPE other counter", "other 1", *lines, ""]))


def healthy(*others: FixedCollector, devices: tuple[int, ...] = (0, 1, 2, 3)) -> Scrape:
    fake = FakeLibtpu(devices).start()
    collectors = (LibtpuCollector(fake.target), *others, FixedCollector("pci", bus()))
    seen = scrape(exporter(*collectors))
    fake.stop()
    return seen


def test_values_are_in_base_units_and_carry_who_the_host_is() -> None:
    seen = healthy(devices=(404, 405, 412, 413))
    assert seen.by("chip", "tpu_hbm_used_bytes") == dict.fromkeys("0123", 18 * 2**30)
    assert seen.by("chip", "tpu_hbm_bandwidth_utilization_ratio") == dict.fromkeys("0123", 0.4125)
    assert seen.by("chip", "tpu_hlo_queue_length", core_type="tensorcore").keys() == set("0123")
    assert seen.value("tpu_runtime_uptime_seconds", framework="JAX") == 7
    assert seen.value("tpu_dcn_tcp_bytes_sent_total") == 123
    assert seen.value("tpu_chips_expected") == 4
    for series in seen.series:
        assert dict(series.labels).keys() >= set(HOST_LABELS), series


def test_histograms_keep_their_counts_in_our_unit() -> None:
    (found,) = healthy().all("tpu_hlo_execution_seconds", chip="2")
    assert found.value == HistogramValue(
        ((0.0001, 0), (0.0002, 1), (0.0004, 6), (0.0008, 26), (0.0016, 30)), 30, 0.0168
    )
    (sent,) = healthy().all("tpu_dcn_transfer_latency_seconds", buffer_size="8MB+")
    assert dict(sent.labels)["transport"] == "grpc"


def test_chip_info_joins_every_name_of_a_chip() -> None:
    (info,) = healthy(devices=(404, 405, 412, 413)).all("tpu_chip_info", chip="2")
    labels = dict(info.labels)
    names = ("device_id", "pci", "dev_path", "generation")
    assert [labels[name] for name in names] == ["412", "0000:00:06", "/dev/vfio/2", "v6e"]


def test_chips_without_a_workload_are_still_described() -> None:
    seen = scrape(exporter(FixedCollector("pci", bus())))
    assert seen.by("chip", "tpu_chip_info") == dict.fromkeys("0123", 1)


def test_devices_of_7x_are_cores_of_its_chips() -> None:
    fake = FakeLibtpu(range(8)).start()
    pci = FixedCollector("pci", bus(4, "0x0076"))
    environment = {"TPU_ACCELERATOR_TYPE": "tpu7x", "TPU_TOPOLOGY": "2x2x1"}
    seen = scrape(exporter(LibtpuCollector(fake.target), pci, environment=environment))
    fake.stop()
    assert seen.by("chip", "tpu_duty_cycle_ratio", core="1").keys() == set("0123")
    assert seen.value("tpu_chips_reporting", source="libtpu") == 4
    assert seen.errors("libtpu") == {}


def test_processes_of_one_host_share_its_chips() -> None:
    fakes = [FakeLibtpu((2 * index, 2 * index + 1)).start() for index in range(2)]
    seen = scrape(exporter(*(LibtpuCollector(fake.target) for fake in fakes)))
    for fake in fakes:
        fake.stop()
    assert seen.by("chip", "tpu_duty_cycle_ratio").keys() == set("0123")
    assert len(seen.all("tpu_runtime_uptime_seconds")) == 2


def test_libtpu_wins_over_the_device_plugin_which_adds_what_libtpu_lacks() -> None:
    page = plugin_page(
        memory_bandwidth_utilization_node=dict.fromkeys(range(4), 99.0),
        tensorcore_utilization_node={0: 12.5, 1: 13.0},
        duty_cycle_node=dict.fromkeys(range(4), 1.0),
    )
    seen = healthy(FixedCollector("device_plugin", page))
    assert set(seen.by("chip", "tpu_hbm_bandwidth_utilization_ratio").values()) == {0.4125}
    assert seen.by("chip", "tpu_tensorcore_utilization_ratio") == {"0": 0.125, "1": 0.13}
    assert seen.value("tpu_chips_reporting", source="device_plugin") == 4


def test_plugin_copy_of_a_runtime_that_is_gone_is_not_shown() -> None:
    fake = FakeLibtpu().start()
    fake.stop()
    page = plugin_page(duty_cycle_node={404: 50.0}, tensorcore_utilization_node={0: 1.0})
    plugin = FixedCollector("device_plugin", page)
    seen = scrape(exporter(LibtpuCollector(fake.target), plugin))
    assert seen.all("tpu_duty_cycle_ratio") == []
    assert seen.by("chip", "tpu_tensorcore_utilization_ratio") == {"0": 0.01}


def test_plugin_alone_gives_the_runtime_too_by_ids_of_the_slice() -> None:
    used = {404: 1.0, 405: 2.0, 412: 3.0, 413: 4.0}
    plugin = FixedCollector("device_plugin", plugin_page(memory_used_node=used))
    seen = scrape(exporter(plugin, FixedCollector("pci", bus())))
    assert seen.by("chip", "tpu_hbm_used_bytes") == {"0": 1, "1": 2, "2": 3, "3": 4}


def test_sdk_gives_throttling_and_links() -> None:
    values = SdkValues(
        values={
            "tensorcore_util": ("87.50", "nonsense"),
            "tpu_throttle_score": ("0-0", "1-10"),
            "ici_link_health": ("tray1.chip3.ici0.int: 6",),
        },
        age_s=12.0,
    )
    seen = healthy(FixedCollector("sdk", values))
    assert seen.by("chip", "tpu_throttle_ratio") == {"0": 0, "1": 1}
    assert seen.value("tpu_ici_link_health_score", tray="1", tray_chip="3", port="ici0") == 6
    assert seen.by("chip", "tpu_tensorcore_utilization_ratio") == {"0": 0.875}
    assert seen.errors("sdk") == {"BAD_VALUE": 1}


def test_sdk_that_only_answers_with_nothing_is_empty() -> None:
    seen = healthy(FixedCollector("sdk", SdkValues(values={"hbm_util": ()}, age_s=1.0)))
    assert seen.errors("sdk") == {"EMPTY": 1}
    assert seen.all("tpu_host_sample_age_seconds") == []


def test_workload_labels_are_on_the_chips_that_it_has() -> None:
    workload = AnnouncedWorkload(
        pid=1, started_ticks=1, model="gemma", deployment="gemma:v6e", replica="r1", chips=(0, 1)
    )
    seen = healthy(FixedCollector("workloads", WorkloadFiles(workloads=(workload,))))
    assert seen.by("chip", "tpu_duty_cycle_ratio", model="gemma", replica="r1").keys() == {"0", "1"}
    assert len(seen.all("tpu_duty_cycle_ratio")) == 4


def test_pods_of_the_kubelet_are_on_their_chips(tmp_path: Path) -> None:
    message = POD_RESOURCES
    devices = [
        message["ContainerDevices"](resource_name="google.com/tpu", device_ids=["0", "2", "x"]),
        message["ContainerDevices"](resource_name="nvidia.com/gpu", device_ids=["1"]),
    ]
    container = message["ContainerResources"](name="ray-worker", devices=devices)
    pod = message["PodResources"](name="w-0", namespace="ray", containers=[container])
    answer = message["ListPodResourcesResponse"](pod_resources=[pod])
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: answer.SerializeToString())
    server = grpc.server(ThreadPoolExecutor(1))
    service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})
    server.add_generic_rpc_handlers((service,))
    socket = tmp_path / "kubelet.sock"
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    seen = scrape(exporter(FixedCollector("pci", bus()), PodCollector(socket)))
    server.stop(None).wait()
    assert seen.by("chip", "tpu_chip_info", namespace="ray", pod="w-0").keys() == {"0", "2"}
    assert seen.errors("pod_resources") == {"BAD_ATTRIBUTE": 1}


def test_pci_is_read_as_linux_shows_it(tmp_path: Path) -> None:
    devices = "bus/pci/devices"
    write_files(
        tmp_path,
        [
            (f"{devices}/0000:00:04.0/vendor", "0x1ae0\n"),
            (f"{devices}/0000:00:04.0/device", "0x0063\n"),
            (f"{devices}/0000:00:05.0/vendor", "0x8086\n"),
            (f"{devices}/0000:00:06.0/vendor", "0x1ae0\n"),
        ],
    )
    seen = scrape(exporter(PciCollector(tmp_path)))
    assert seen.value("tpu_chips_detected") == 1
    # Four are expected, and nobody can say which of them this one is.
    assert seen.all("tpu_chip_info") == []
    assert scrape(exporter(PciCollector(tmp_path / "none"))).all("tpu_chips_detected") == []


def test_workload_counts_while_its_process_lives_and_holds_a_chip(tmp_path: Path) -> None:
    def process(pid: int, ticks: int, *links: str) -> None:
        stat = f"{pid} (a) b) S " + " ".join(["0"] * 18) + f" {ticks} 0"
        write_files(tmp_path / "proc", [(f"{pid}/stat", stat), (f"{pid}/fd/keep", "")])
        for number, link in enumerate(links):
            os.symlink(link, tmp_path / "proc" / f"{pid}" / "fd" / f"{number}")

    process(10, 500, "/dev/null", "/dev/vfio/3")
    process(11, 500, "/dev/vfio/vfio")
    process(12, 999, "/dev/accel0")
    for pid in (10, 11, 12, 13):
        workload = AnnouncedWorkload(
            pid=pid, started_ticks=500, model="m", deployment="d", replica=f"r{pid}"
        )
        write_files(tmp_path, [(f"workloads/{pid}.json", workload.model_dump_json())])
    found = WorkloadCollector(tmp_path, tmp_path / "proc").collect(1.0)
    assert found is not None
    # 11 holds no chip, 12 is another process with the same id, 13 is dead.
    assert [workload.replica for workload in found.workloads] == ["r10"]


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=300),
    st.floats(0.001, 10.0),
    st.integers(1, 20),
)
def test_a_thinned_histogram_is_exact_where_it_still_has_a_bound(
    counts: list[int], step: float, most: int
) -> None:
    bounds = [step * edge for edge in range(1, len(counts))]
    full = histogram(bounds, counts, sum(counts), 1.0, 1.0)
    kept = thinned(full, most)
    assert len(kept.buckets) <= most
    assert set(kept.buckets) <= set(full.buckets)
    assert kept.buckets[-1] == full.buckets[-1]
    assert (kept.count, kept.total) == (full.count, full.total)
