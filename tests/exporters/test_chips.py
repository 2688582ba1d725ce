"""Numbering of chips and devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scrapes import bus

from serving.domain.topology import Generation
from serving.exporters.chips import (
    DeviceLocation,
    DeviceMap,
    TooManyDevicesError,
    chips_of_host,
    chips_on_bus,
    devices_per_chip,
    index_of,
    learn_devices,
    named_generation,
    sized,
)
from serving.exporters.collector import PciBus, PciFunction

FULL = (404, 405, 412, 413)


def test_ids_within_the_slice_are_ranked_within_the_host() -> None:
    devices = learn_devices(sized(DeviceMap(), 1, 4), FULL)
    assert [devices.by_id(device) for device in FULL] == [DeviceLocation(rank) for rank in range(4)]


@given(st.sets(st.sampled_from(FULL), min_size=1))
def test_a_part_of_a_known_set_renames_no_device(part: set[int]) -> None:
    known = learn_devices(DeviceMap(1, 4), FULL)
    assert learn_devices(known, part) == known


def test_other_ids_after_a_restart_are_ranked_afresh() -> None:
    known = learn_devices(DeviceMap(1, 4), FULL)
    again = learn_devices(known, range(8, 12))
    assert again.by_id(9) == DeviceLocation(1)
    assert again.by_id(404) == DeviceLocation(None, device_id=404)


def test_small_ids_of_an_incomplete_set_are_ranks_themselves() -> None:
    assert learn_devices(DeviceMap(1, 4), (0, 2, 3)).by_id(2) == DeviceLocation(2)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(TooManyDevicesError):
        learn_devices(DeviceMap(1, 4), range(8))


def test_devices_of_a_chip_with_two_are_its_cores() -> None:
    devices = learn_devices(sized(DeviceMap(), 2, 4), range(8, 16))
    assert [devices.by_id(device) for device in (8, 9, 15)] == [
        DeviceLocation(0, 0),
        DeviceLocation(0, 1),
        DeviceLocation(3, 1),
    ]


@pytest.mark.parametrize("ordinals", [FULL, (0, 1, 2, 3)])
def test_ordinals_are_ids_or_ranks_as_the_whole_set_says(ordinals: tuple[int, ...]) -> None:
    devices = learn_devices(DeviceMap(1, 4), FULL)
    assert list(devices.by_ordinals(ordinals).values()) == [
        DeviceLocation(rank) for rank in range(4)
    ]


def test_positions_are_chips_if_they_fit_and_devices_if_not() -> None:
    devices = DeviceMap(2, 8)
    assert devices.by_position({3}) == {3: DeviceLocation(3)}
    assert devices.by_position({3, 7}) == {3: DeviceLocation(1, 1), 7: DeviceLocation(3, 1)}
    assert devices.by_position({8}) is None


def test_chips_are_in_order_of_address_and_functions_of_one_count_once() -> None:
    functions = (
        PciFunction(address="0000:05:01.0", device="0x0076", iommu_group="7"),
        PciFunction(address="0000:04:01.1", device="0x0076", iommu_group="6"),
        PciFunction(address="0000:04:01.0", device="0x0076", iommu_group="6"),
        PciFunction(address="0000:00:01.0", device="0x1234", iommu_group="1"),
    )
    chips = chips_on_bus(PciBus(functions=functions))
    assert [(chip.index, chip.address, chip.dev_path) for chip in chips] == [
        (0, "0000:04:01", "/dev/vfio/6"),
        (1, "0000:05:01", "/dev/vfio/7"),
    ]
    assert {chip.generation for chip in chips} == {Generation.TPU7X}


@pytest.mark.parametrize(
    ("device_id", "index"),
    [("accel2", 2), ("3", 3), ("0000:00:05.0", 1), ("0000:00:05", 1), ("vfio", None)],
)
def test_kubernetes_names_a_chip_in_three_ways(device_id: str, index: int | None) -> None:
    assert index_of(device_id, chips_on_bus(bus())) == index


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips"),
    [
        ("tpu-v6e-slice", "4x4", 4),
        ("v6e-16", "4x4", 4),
        ("v5litepod-16", "4x4", 4),
        ("tpu7x", "2x2x1", 4),
        # One host of eight chips, or two of four: nobody can tell.
        ("tpu-v6e-slice", "2x4", None),
        ("tpu-v6e-slice", "7x7", None),
        ("h100", "4x4", None),
        ("", "", None),
    ],
)
def test_expected_chips_are_known_where_the_topology_leaves_no_choice(
    accelerator: str, topology: str, chips: int | None
) -> None:
    assert chips_of_host(named_generation(accelerator), topology) == chips


def test_devices_per_chip_come_from_the_generation() -> None:
    assert [
        devices_per_chip(generation) for generation in (None, Generation.V6E, Generation.TPU7X)
    ] == [
        1,
        1,
        2,
    ]
