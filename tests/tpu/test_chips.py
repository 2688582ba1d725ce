"""The chips of engines that share a slice: each chip once, and what libtpu is told of them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serving.domain.topology import Generation, TopologyError, engine_shape, shapes, slice_shape
from serving.tpu.chips import (
    chips_environment,
    chips_of_engine,
    host_of_engine,
    metrics_ports,
)

SHAPES = st.sampled_from(Generation).flatmap(lambda name: st.sampled_from(shapes(name)))


@given(SHAPES, st.integers(1, 300))
def test_every_chip_of_every_host_is_of_one_engine(shape, num_engines: int) -> None:  # type: ignore[no-untyped-def]
    try:
        part = engine_shape(shape, num_engines)
    except TopologyError:
        return
    if num_engines == 1:
        assert host_of_engine(shape, 1, 0) == 0
        return
    chips = [
        (host_of_engine(shape, num_engines, number), chip)
        for number in range(num_engines)
        for chip in chips_of_engine(shape, num_engines, number)
    ]
    hosts = range(shape.num_hosts)
    assert Counter(chips) == Counter(
        (host, chip) for host in hosts for chip in range(shape.chips_per_host)
    )
    assert len(chips) == part.num_chips * num_engines


@given(SHAPES, st.integers(2, 300))
def test_processes_on_one_host_share_no_chip_and_no_port(shape, num_engines: int) -> None:  # type: ignore[no-untyped-def]
    try:
        engine_shape(shape, num_engines)
    except TopologyError:
        return
    for host in range(shape.num_hosts):
        environments = [
            chips_environment(shape, num_engines, number)
            for number in range(num_engines)
            if host_of_engine(shape, num_engines, number) == host
        ]
        for name in ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_PORT", "TPU_RUNTIME_METRICS_PORTS"):
            values = [each[name] for each in environments]
            assert len(values) == len(set(values))
        told = [int(each["TPU_RUNTIME_METRICS_PORTS"]) for each in environments]
        assert tuple(told) == metrics_ports(shape, num_engines)


def test_second_engine_of_four_chips_on_a_host_of_eight() -> None:
    assert chips_environment(slice_shape("v6e", "2x4"), 2, 1) == {
        "TPU_VISIBLE_CHIPS": "4,5,6,7",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_PORT": "8477",
        "TPU_PROCESS_ADDRESSES": "localhost:8477",
        "CLOUD_TPU_TASK_ID": "0",
        "TPU_RUNTIME_METRICS_PORTS": "8432",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def test_engine_that_has_a_slice_for_itself_is_told_nothing() -> None:
    assert chips_environment(slice_shape("v6e", "4x4"), 1, 0) == {}
