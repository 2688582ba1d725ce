"""The number of series is a number, and pages stay below it."""

from collections import Counter

import pytest
from cardinality import (
    MANY_SLICES,
    ONE_SLICE,
    FleetSize,
    series_of_fleet,
    series_per_chip,
    series_per_host,
    series_per_slice,
)
from libtpu_fake import EXECUTION, TRANSFER, FakeLibtpu, distribution, metric, of_program, several
from scrapes import FixedCollector, bus, exporter

from serving.domain.topology import slice_shape
from serving.exporters.exposition import families
from serving.exporters.libtpu_service.client import LibtpuCollector
from serving.telemetry.metric_names import Metric

NUM_SLICES = 1000


@pytest.mark.parametrize(
    ("metrics", "bound"),
    # What docs/operate/tpu-exporter.md states. Slicewise serves each replica from one slice, which
    # has no traffic between slices.
    [(ONE_SLICE, 1_505_000), (MANY_SLICES, 4_000_000)],
)
def test_a_thousand_slices_of_16_chips_stay_under_the_stated_bound(
    metrics: tuple[Metric, ...], bound: int
) -> None:
    shape = slice_shape("v6e", "4x4")
    assert (shape.num_chips, shape.num_hosts) == (16, 4)
    assert NUM_SLICES * series_per_slice(shape, metrics) <= bound


@pytest.mark.parametrize(
    ("num_gateways", "bound"),
    # What docs/reference/metrics.md states, of 10 models on 4 classes each, and 50 tenants.
    [(1, 131_000), (8, 545_000)],
)
def test_gateways_of_a_thousand_slices_stay_under_the_stated_bound(
    num_gateways: int, bound: int
) -> None:
    fleet = FleetSize(num_gateways, NUM_SLICES, num_models=10, classes_per_model=4)
    assert series_of_fleet(fleet) <= bound


def test_exporters_and_gateways_together_stay_under_two_million() -> None:
    of_chips = NUM_SLICES * series_per_slice(slice_shape("v6e", "4x4"), ONE_SLICE)
    fleet = FleetSize(8, NUM_SLICES, num_models=10, classes_per_model=4)
    assert of_chips + series_of_fleet(fleet) <= 2_000_000


def test_engine_is_counted_once_and_its_link_by_every_gateway() -> None:
    one, two = (series_of_fleet(FleetSize(num, 10, 1, 1)) for num in (1, 2))
    more = series_of_fleet(FleetSize(1, 11, 1, 1))
    assert two < 2 * one
    assert more > one


def test_a_slice_is_its_chips_and_its_hosts() -> None:
    shape = slice_shape("v6e", "4x4")
    assert series_per_slice(shape) == 16 * series_per_chip(shape) + 4 * series_per_host()


def test_chips_with_two_devices_have_nearly_twice_the_series() -> None:
    one, two = slice_shape("v6e", "4x4"), slice_shape("tpu7x", "2x2x4")
    assert series_per_chip(one) < series_per_chip(two) < 2 * series_per_chip(one)


def test_the_worst_that_a_runtime_can_say_is_within_the_bound() -> None:
    fake = FakeLibtpu().start()
    counts = [1] * 200
    many = [f"size-{number}" for number in range(50)]
    fake.faults.overrides = {
        EXECUTION: [
            metric(of_program(chip), **distribution(counts, 1.0, 5.0)) for chip in range(4)
        ],
        TRANSFER: [
            metric(
                several("megascale", buffer_size=size, type="grpc"),
                **distribution(counts, 1.0, 5.0),
            )
            for size in many
        ],
    }
    source = exporter(LibtpuCollector(fake.target), FixedCollector("pci", bus()))
    samples = [sample for family in families(source.scrape()) for sample in family.samples]
    fake.stop()
    by_chip = Counter("chip" in sample.labels for sample in samples)
    shape = slice_shape("v6e", "4x4")
    assert by_chip[True] <= 4 * series_per_chip(shape)
    assert by_chip[False] <= series_per_host()
    assert sum(sample.name == "tpu_dcn_transfer_latency_seconds_count" for sample in samples) == 4
