"""Forms of libtpu's answers that the healthy fake does not send, and the SDK's child program."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from libtpu_fake import (
    BYTES_SENT,
    DUTY,
    EXECUTION,
    MEGASCALE_ERROR,
    QUEUE,
    TRANSFER,
    attribute,
    by_device,
    counter,
    gauge,
    metric,
    of_program,
    several,
)
from scrapes import write_files

from serving.config.slice_spec import Work
from serving.exporters.collector import AnnouncedWorkload, LibtpuAnswers, PluginPage
from serving.exporters.host_decode import decode_plugin_page
from serving.exporters.host_sources import (
    WorkloadCollector,
    announce_host,
    announce_workload,
    start_ticks,
)
from serving.exporters.libtpu_service.decode import decode_libtpu
from serving.exporters.libtpu_service.sdk import SdkChild, sdk_command
from serving.exporters.series import Decoded, HistogramValue
from serving.exporters.wire import LIBTPU, MessageClass
from serving.slices.host_agent import announce_work


def decoded(name: str, *metrics: MessageClass) -> Decoded:
    message = LIBTPU["MetricResponse"](metric=LIBTPU["TPUMetric"](name=name, metrics=metrics))
    return decode_libtpu(
        LibtpuAnswers(supported=(name,), answers={name: message.SerializeToString()}, failures={})
    )


def with_buckets(counts: list[int], **layout: Mapping[str, object]) -> MessageClass:
    options = LIBTPU["BucketOptions"](**layout)
    found = LIBTPU["Distribution"](
        count=sum(counts), mean=2.0, bucket_options=options, bucket_counts=counts
    )
    return metric(of_program(0), distribution=found)


@pytest.mark.parametrize(
    ("layout", "bounds"),
    [
        ({"explicit_buckets": {"bounds": [100.0, 300.0]}}, [0.0001, 0.0003]),
        (
            {"linear_buckets": {"num_finite_buckets": 1, "width": 200.0, "offset": 100.0}},
            [0.0001, 0.0003],
        ),
        (
            {"exponential_buckets": {"num_finite_buckets": 1, "growth_factor": 3, "scale": 100.0}},
            [0.0001, 0.0003],
        ),
    ],
)
def test_every_layout_of_buckets_gives_its_bounds(
    layout: Mapping[str, Mapping[str, object]], bounds: list[float]
) -> None:
    # The last of three counts is missing, as trailing zeros may be.
    (point,) = decoded(EXECUTION, with_buckets([1, 2], **layout)).ordinals
    assert isinstance(point.value, HistogramValue)
    assert point.value.buckets == tuple(zip(bounds, [1, 3], strict=True))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"explicit_buckets": {"bounds": [300.0, 100.0]}},
        {"explicit_buckets": {"bounds": [float("nan"), 100.0]}},
        {"linear_buckets": {"num_finite_buckets": 1 << 30, "width": 1.0}},
        {"exponential_buckets": {"num_finite_buckets": -1, "growth_factor": 2, "scale": 1.0}},
        {"exponential_buckets": {"num_finite_buckets": 900, "growth_factor": 1e9, "scale": 1.0}},
        {"explicit_buckets": {"bounds": []}},
    ],
)
def test_a_layout_that_makes_no_sense_is_a_bad_distribution(
    layout: Mapping[str, Mapping[str, object]],
) -> None:
    found = decoded(EXECUTION, with_buckets([1, 2], **layout))
    assert (found.ordinals, found.problems) == ([], {"BAD_DISTRIBUTION": 1})


def test_bytes_that_are_no_message_are_unreadable() -> None:
    answers = LibtpuAnswers(supported=(DUTY,), answers={DUTY: b"\xff\xff"}, failures={})
    assert decode_libtpu(answers).problems == {"UNREADABLE": 1}


def test_errors_between_slices_are_flags_by_type_and_by_nothing_else() -> None:
    found = decoded(
        MEGASCALE_ERROR,
        *(
            metric(several("error", error_type=kind, host_name=host), **gauge(value))
            for kind, host, value in (("HANG", "a", 0), ("HANG", "b", 3), ("OTHER", "a", 0))
        ),
        metric(several("error", error_type="TRUE"), gauge=LIBTPU["Gauge"](as_bool=True)),
    )
    assert {dict(point.labels)["error_type"]: point.value for point in found.points} == {
        "HANG": 1,
        "OTHER": 0,
        "TRUE": 1,
    }
    assert all(len(point.labels) == 1 for point in found.points)


def test_counters_of_several_devices_are_one_of_the_host() -> None:
    found = decoded(BYTES_SENT, by_device(0, counter(5)), by_device(1, counter(7)))
    assert [(point.device, point.value) for point in found.points] == [(None, 12)]
    empty = metric(attribute("device-id", 0), counter=LIBTPU["Counter"]())
    assert decoded(BYTES_SENT, empty).problems == {"BAD_VALUE": 1}


def test_ordinals_are_numbers_in_old_releases_and_dashes_are_underscores() -> None:
    (old,) = decoded(QUEUE, metric(several("hlo", device_ordinal=3), **gauge(1))).ordinals
    assert old.device == 3
    sent = metric(several("megascale", **{"buffer-size": "1MB", "type": "tcp"}))
    assert decoded(TRANSFER, sent).problems == {"BAD_DISTRIBUTION": 1}
    assert decoded(QUEUE, metric(several("hlo"), **gauge(1))).problems == {"BAD_ATTRIBUTE": 1}


def test_plugin_values_that_cannot_be_meant_are_dropped() -> None:
    text = (
        'tensorcore_utilization_node{accelerator_id="1-0"} 300\n'
        'tensorcore_utilization_node{accelerator_id="none"} 3\n'
        'tensorcore_utilization_node{accelerator_id="1-1"} 3\n'
    )
    found = decode_plugin_page(PluginPage(text=text), is_only_source=False)
    assert [point.device for point in found.host_points] == [1]
    assert found.problems == {"BAD_VALUE": 1, "BAD_ATTRIBUTE": 1}


def test_a_process_announces_itself_with_its_own_start(tmp_path: Path) -> None:
    path = announce_workload(tmp_path, "gemma", "gemma:v6e", "r1", (0, 1))
    said = AnnouncedWorkload.model_validate_json(path.read_bytes())
    assert said.started_ticks == start_ticks(Path("/proc/self"))
    assert (said.pid, said.model, said.replica, said.chips) == (os.getpid(), "gemma", "r1", (0, 1))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_process_that_holds_the_host_counts_without_an_open_chip(tmp_path: Path) -> None:
    collector = WorkloadCollector(tmp_path)
    announce_workload(tmp_path, "gemma", "d", "r1")
    without = collector.collect(1.0)
    announce_work(tmp_path, Work("gemma", "d", "r1"))
    held = collector.collect(1.0)
    assert without is not None
    assert held is not None
    assert without.workloads == ()
    assert [(workload.model, workload.replica, workload.chips) for workload in held.workloads] == [
        ("gemma", "r1", None)
    ]


def test_folder_that_cannot_be_written_costs_the_labels_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "workloads").write_text("in the way")
    announce_work(tmp_path, Work("gemma", "d", "r1"))
    assert "work_not_announced" in caplog.text


def test_the_child_reads_the_sdk_of_its_python_and_only_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = """
class _Metric:
    def data(self): return ["0-0", "1-2"]
def list_supported_metrics(): return ["tpu_throttle_score", "duty_cycle_pct"]
def get_metric(name):
    print("libtpu prints as well")
    return _Metric()
"""
    write_files(
        tmp_path,
        [
            ("libtpu/__init__.py", ""),
            ("libtpu/sdk/__init__.py", ""),
            ("libtpu/sdk/tpumonitoring.py", sdk),
        ],
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    child = SdkChild(sdk_command(sys.executable))
    answers = [child.ask(60.0) for _ in range(2)]
    child.close()
    assert answers == [{"tpu_throttle_score": ("0-0", "1-2")}] * 2


def test_process_of_another_container_counts_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    """Its process id means nothing here; the lock on its file does."""
    held = announce_host(tmp_path, "gemma", "d", "r1")
    collector = WorkloadCollector(tmp_path, tmp_path / "another-proc")
    before = collector.collect(1.0)
    os.close(held)
    after = collector.collect(1.0)
    assert before is not None
    assert after is not None
    assert ([each.replica for each in before.workloads], after.workloads) == (["r1"], ())
