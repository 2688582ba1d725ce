"""Slice shapes: the table, its agreement with Ray's own, and refusals that name the nearest."""

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.accelerators import tpu as ray_tpu
from ray.util.accelerators import accelerators as ray_accelerators
from ray.util.tpu import get_tpu_version_from_type, get_tpu_worker_resources

from serving.domain.topology import (
    GIB,
    Generation,
    SliceShape,
    TopologyError,
    check_parallelism,
    engine_shape,
    parallelism_choices,
    shapes,
    slice_shape,
)

GENERATIONS = st.sampled_from(Generation)
SHAPES = GENERATIONS.flatmap(lambda generation: st.sampled_from(shapes(generation)))
EVERY_SHAPE = [shape for generation in Generation for shape in shapes(generation)]


def ray_name(shape: SliceShape) -> str:
    return get_tpu_version_from_type(shape.ray_accelerator_type)


def refusal(asked: Callable[[], object]) -> TopologyError | None:
    try:
        asked()
    except TopologyError as error:
        return error
    return None


def is_default(shape: SliceShape) -> bool:
    return shape == slice_shape(shape.generation, shape.topology)


# Generation, topology, chips per host; chips, hosts, devices; pod type, machine type.
TABLE = [
    ("v4", "2x2x1", None, 4, 1, 4, "v4-8", "ct4p-hightpu-4t"),
    ("v4", "12x12x16", None, 2304, 576, 2304, "v4-4608", "ct4p-hightpu-4t"),
    ("v5e", "1x1", None, 1, 1, 1, "v5litepod-1", "ct5lp-hightpu-1t"),
    ("v5e", "2x2", None, 4, 1, 4, "v5litepod-4", "ct5lp-hightpu-4t"),
    ("v5e", "2x4", None, 8, 1, 8, "v5litepod-8", "ct5lp-hightpu-8t"),
    ("v5e", "2x4", 4, 8, 2, 8, "v5litepod-8", "ct5lp-hightpu-4t"),
    ("v5e", "16x16", None, 256, 64, 256, "v5litepod-256", "ct5lp-hightpu-4t"),
    ("v5p", "2x2x1", None, 4, 1, 4, "v5p-8", "ct5p-hightpu-4t"),
    ("v5p", "2x2x2", None, 8, 2, 8, "v5p-16", "ct5p-hightpu-4t"),
    ("v5p", "16x16x24", None, 6144, 1536, 6144, "v5p-12288", "ct5p-hightpu-4t"),
    ("v6e", "2x4", 8, 8, 1, 8, "v6e-8", "ct6e-standard-8t"),
    ("v6e", "2x4", 4, 8, 2, 8, "v6e-8", "ct6e-standard-4t"),
    ("v6e", "4x4", None, 16, 4, 16, "v6e-16", "ct6e-standard-4t"),
    ("tpu7x", "2x2x1", None, 4, 1, 8, "v7x-8", "tpu7x-standard-4t"),
    ("tpu7x", "2x2x2", None, 8, 2, 16, "v7x-16", "tpu7x-standard-4t"),
    ("tpu7x", "8x16x16", None, 2048, 512, 4096, "v7x-4096", "tpu7x-standard-4t"),
]


@pytest.mark.parametrize(
    ("generation", "topology", "asked", "chips", "hosts", "devices", "pod_type", "machine"), TABLE
)
def test_shape_has_the_counts_and_names_of_the_documentation(
    generation: str,
    topology: str,
    asked: int | None,
    chips: int,
    hosts: int,
    devices: int,
    pod_type: str,
    machine: str,
) -> None:
    shape = slice_shape(generation, topology, asked)
    assert (shape.num_chips, shape.num_hosts, shape.num_devices) == (chips, hosts, devices)
    assert (shape.ray_pod_type, shape.gke_machine_type) == (pod_type, machine)


@pytest.mark.parametrize(
    ("generation", "accelerator", "ray_type", "devices", "gib_per_chip", "gib_per_device"),
    [
        ("v4", "tpu-v4-podslice", ray_accelerators.GOOGLE_TPU_V4, 1, 32, 32),
        ("v5e", "tpu-v5-lite-podslice", ray_accelerators.GOOGLE_TPU_V5LITEPOD, 1, 16, 16),
        ("v5p", "tpu-v5p-slice", ray_accelerators.GOOGLE_TPU_V5P, 1, 95, 95),
        ("v6e", "tpu-v6e-slice", ray_accelerators.GOOGLE_TPU_V6E, 1, 32, 32),
        ("tpu7x", "tpu7x", ray_accelerators.GOOGLE_TPU_V7X, 2, 192, 96),
    ],
)
def test_generation_has_its_owners_names_and_memory(
    generation: str,
    accelerator: str,
    ray_type: str,
    devices: int,
    gib_per_chip: int,
    gib_per_device: int,
) -> None:
    for shape in shapes(generation):
        assert shape.gke_accelerator == accelerator
        assert shape.ray_accelerator_type == ray_type
        assert shape.devices_per_chip == devices
        assert shape.hbm_bytes_per_chip == gib_per_chip * GIB
        assert shape.hbm_bytes_per_device == gib_per_device * GIB


@pytest.mark.parametrize("shape", EVERY_SHAPE, ids=lambda shape: f"{shape.topology}")
def test_every_shape_agrees_with_ray(shape: SliceShape) -> None:
    name = ray_name(shape)
    assert ray_tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_topology(name, shape.topology)
    assert ray_tpu.get_num_chips_from_topology(shape.topology) == shape.num_chips
    accelerator_type = shape.ray_accelerator_type
    pod_type = ray_tpu.infer_tpu_pod_type_from_topology(shape.topology, accelerator_type)
    assert pod_type == shape.ray_pod_type
    assert ray_tpu.get_total_chips_from_accelerator_type(shape.ray_pod_type) == shape.num_chips
    assert ray_tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_type(shape.ray_pod_type)
    num_workers, resources = get_tpu_worker_resources(
        shape.topology, accelerator_type, chips_per_vm=shape.chips_per_host, tpu_resource_per_chip=1
    )
    assert (num_workers, resources["TPU"]) == (shape.num_hosts, shape.chips_per_host)


@pytest.mark.parametrize("generation", Generation)
def test_default_host_is_the_one_ray_assumes(generation: Generation) -> None:
    for shape in filter(is_default, shapes(generation)):
        assert ray_tpu.get_chips_per_host(shape.topology, ray_name(shape)) == shape.chips_per_host
        visible = ray_tpu.get_num_tpu_visible_chips_per_host(shape.ray_pod_type)
        assert visible == shape.chips_per_host


@pytest.mark.parametrize("generation", Generation)
def test_only_2x8_and_swapped_axes_are_rays_alone(generation: Generation) -> None:
    ours = {shape.topology for shape in shapes(generation)}
    rays = set(ray_tpu.VALID_TPU_TOPOLOGY[ray_name(shapes(generation)[0])])

    def has_swapped_axes(topology: str) -> bool:
        axes = [int(axis) for axis in topology.split("x")]
        return min(axes) >= 4 and axes != sorted(axes)

    alone = {topology for topology in rays - ours if not has_swapped_axes(topology)}
    assert alone == ({"2x8"} if generation in (Generation.V5E, Generation.V6E) else set())
    assert ours <= rays


@pytest.mark.parametrize("generation", Generation)
def test_shapes_are_ordered_by_chips_without_repeats(generation: Generation) -> None:
    every = shapes(generation)
    assert [shape.num_chips for shape in every] == sorted(shape.num_chips for shape in every)
    assert len(set(every)) == len(every)


def test_two_machine_shapes_exist_only_of_2x4() -> None:
    twice = {
        (shape.generation, shape.topology, shape.chips_per_host)
        for shape in EVERY_SHAPE
        if not is_default(shape)
    }
    assert twice == {(Generation.V5E, "2x4", 4), (Generation.V6E, "2x4", 4)}


@given(SHAPES)
def test_hosts_are_whole_and_a_shape_is_found_by_what_it_is(shape: SliceShape) -> None:
    assert shape.num_hosts * shape.chips_per_host == shape.num_chips
    assert shape.num_devices % shape.num_hosts == 0
    assert slice_shape(shape.generation, shape.topology, shape.chips_per_host) == shape


@pytest.mark.parametrize(
    ("generation", "written", "topology"),
    [
        ("v6e", "4x4x1", "4x4"),
        ("v6e", "1x1x1", "1x1"),
        ("v5p", "2x2", "2x2x1"),
        ("tpu7x", "2x2x1x1", "2x2x1"),
        ("v6e", " 2X4 ", "2x4"),
    ],
)
def test_axes_of_length_one_may_be_left_out_or_added(
    generation: str, written: str, topology: str
) -> None:
    assert slice_shape(generation, written).topology == topology


# Generation, topology, chips per host; the message.
REFUSALS = [
    (
        ("v6e", "3x3", None),
        "no v6e slice of this topology can be reserved (value 3x3); nearest allowed: 2x2, 2x4, 4x4",
    ),
    (
        ("v6e", "4x2", None),
        "no v6e slice of this topology can be reserved (value 4x2); nearest allowed: 2x4",
    ),
    (
        ("v6e", "2x2x2", None),
        "no v6e slice of this topology can be reserved (value 2x2x2); "
        "nearest allowed: 2x2, 2x4, 4x4",
    ),
    (
        ("v5p", "4x4x1", None),
        "no v5p slice of this topology can be reserved (value 4x4x1); "
        "nearest allowed: 2x2x2, 2x2x4, 2x4x4",
    ),
    (
        ("v5p", "8x4x4", None),
        "no v5p slice of this topology can be reserved (value 8x4x4); nearest allowed: 4x4x8",
    ),
    (
        ("tpu7x", "1x1x1", None),
        "no tpu7x slice of this topology can be reserved (value 1x1x1); "
        "nearest allowed: 2x2x1, 2x2x2, 2x2x4",
    ),
    (
        ("v5e", "v5litepod-8", None),
        "not a topology: chips along each axis, joined by x (value v5litepod-8); "
        "nearest allowed: 1x1, 2x2, 2x4",
    ),
    (
        ("v6e", "\uff12x\uff12", None),
        "not a topology: chips along each axis, joined by x (value \uff12x\uff12); "
        "nearest allowed: 1x1, 2x2, 2x4",
    ),
    (
        ("v6e", "2x4", 2),
        "no host of a v6e 2x4 slice has that many chips (value 2); nearest allowed: 4, 8",
    ),
    (
        ("v6e", "4x4", 8),
        "no host of a v6e 4x4 slice has that many chips (value 8); nearest allowed: 4",
    ),
    (
        ("v5p", "2x2x1", 3),
        "no host of a v5p 2x2x1 slice has that many chips (value 3); nearest allowed: 4",
    ),
    (
        ("v7x", "2x2x1", None),
        "unknown generation (value v7x); nearest allowed: v4, v5e, v5p, v6e, tpu7x",
    ),
]


@pytest.mark.parametrize(("asked", "message"), REFUSALS)
def test_impossible_slice_is_refused_with_the_nearest(
    asked: tuple[str, str, int | None], message: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        slice_shape(*asked)
    assert str(caught.value) == message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_shapes_of_an_unknown_generation_are_refused() -> None:
    with pytest.raises(TopologyError, match="unknown generation"):
        shapes("v3")


AXES = st.lists(st.integers(0, 40), min_size=1, max_size=4)


@given(generation=GENERATIONS, topology=AXES.map(lambda axes: "x".join(map(str, axes))) | st.text())
def test_any_topology_is_a_shape_or_refused_with_choices_that_exist(
    generation: Generation, topology: str
) -> None:
    known = {shape.topology for shape in shapes(generation)}
    refused = refusal(lambda: slice_shape(generation, topology))
    if refused is None:
        assert slice_shape(generation, topology).topology in known
    else:
        assert refused.choices
        assert set(refused.choices) <= known
        assert topology.strip().lower() not in known


@given(shape=SHAPES, chips_per_host=st.integers(-8, 64))
def test_host_is_whole_or_refused(shape: SliceShape, chips_per_host: int) -> None:
    refused = refusal(lambda: slice_shape(shape.generation, shape.topology, chips_per_host))
    if refused is not None:
        assert str(chips_per_host) not in refused.choices
    else:
        found = slice_shape(shape.generation, shape.topology, chips_per_host)
        assert found.num_hosts * chips_per_host == shape.num_chips
        assert found.gke_machine_type.endswith(f"-{chips_per_host}t")


@pytest.mark.parametrize(
    ("asked", "choices"),
    [
        (("v6e", "1x1", None), [(1, 1)]),
        (("v6e", "2x4", 8), [(8, 1), (4, 2), (2, 4), (1, 8)]),
        (("v6e", "2x4", 4), [(8, 1), (4, 2)]),
        (("v6e", "4x4", None), [(16, 1), (4, 4)]),
        # Two devices a chip: sizes count devices, and no stage is half a chip.
        (("tpu7x", "2x2x1", None), [(8, 1), (4, 2), (2, 4)]),
        (("tpu7x", "2x2x2", None), [(16, 1), (8, 2)]),
        # A stage sees one chip for two devices, where a chip is one: half of its chips.
        (("v5p", "2x2x2", None), [(8, 1)]),
        (("v5p", "2x2x1", None), [(4, 1), (1, 4)]),
        (("v4", "2x2x4", None), [(16, 1)]),
    ],
)
def test_parallel_sizes_use_every_device_in_whole_stages(
    asked: tuple[str, str, int | None], choices: list[tuple[int, int]]
) -> None:
    assert list(parallelism_choices(slice_shape(*asked))) == choices


@pytest.mark.parametrize(
    ("asked", "sizes", "message"),
    [
        (
            ("v6e", "4x4"),
            (8, 1),
            "tensor x pipeline is not the 16 devices of a v6e 4x4 slice (value 8 x 1); "
            "nearest allowed: 16 x 1, 4 x 4",
        ),
        (
            ("v6e", "4x4"),
            (8, 2),
            "a pipeline stage of a v6e 4x4 slice is one host, or all of them (value 8 x 2); "
            "nearest allowed: 16 x 1, 4 x 4",
        ),
        (
            ("tpu7x", "2x2x1"),
            (4, 1),
            "tensor x pipeline is not the 8 devices of a tpu7x 2x2x1 slice (value 4 x 1); "
            "nearest allowed: 8 x 1, 4 x 2, 2 x 4",
        ),
        (
            ("tpu7x", "2x2x1"),
            (1, 8),
            "a pipeline stage of a tpu7x 2x2x1 slice is one chip or more (value 1 x 8); "
            "nearest allowed: 2 x 4, 4 x 2, 8 x 1",
        ),
        (
            ("v5p", "2x2x2"),
            (4, 2),
            "a pipeline stage of a v5p 2x2x2 slice would see half of its chips (value 4 x 2); "
            "nearest allowed: 8 x 1",
        ),
        (
            ("v6e", "2x2"),
            (0, -1),
            "tensor x pipeline is not the 4 devices of a v6e 2x2 slice (value 0 x -1); "
            "nearest allowed: 4 x 1, 2 x 2, 1 x 4",
        ),
    ],
)
def test_sizes_that_do_not_fill_the_slice_are_refused_with_the_nearest(
    asked: tuple[str, str], sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        check_parallelism(slice_shape(*asked), *sizes)
    assert str(caught.value) == message


@given(SHAPES)
def test_parallel_choices_fill_the_slice_and_pass_their_own_check(shape: SliceShape) -> None:
    devices_per_host = shape.num_devices // shape.num_hosts
    for tensor, pipeline in parallelism_choices(shape):
        assert tensor * pipeline == shape.num_devices
        # No stage has a part of one host beside the whole of another.
        assert tensor % devices_per_host == 0 or shape.num_hosts == 1
        check_parallelism(shape, tensor, pipeline)


@given(shape=SHAPES, tensor=st.integers(-2, 40), pipeline=st.integers(-2, 40))
def test_sizes_pass_exactly_when_they_are_a_choice(
    shape: SliceShape, tensor: int, pipeline: int
) -> None:
    choices = parallelism_choices(shape)
    refused = refusal(lambda: check_parallelism(shape, tensor, pipeline))
    assert (refused is None) == ((tensor, pipeline) in choices)
    if refused is not None:
        assert set(refused.choices) <= {f"{t} x {p}" for t, p in choices}


def test_importing_topology_loads_only_the_standard_library() -> None:
    program = (
        "import sys; before = set(sys.modules); import serving.domain.topology;"
        "print({m.partition('.')[0] for m in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names) - {'serving'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


# -- slices that several engines share --

# Generation, topology, chips per host, engines; topology of each one's part.
PARTS = [
    ("v6e", "2x4", 8, 8, "1x1"),
    ("v6e", "2x4", 8, 2, "2x2"),
    ("v6e", "2x4", 4, 2, "2x2"),
    ("v6e", "2x4", 4, 8, "1x1"),
    ("v5e", "2x2", None, 4, "1x1"),
    ("v6e", "4x4", None, 4, "2x2"),
    ("v5p", "2x2x2", None, 2, "2x2x1"),
    ("tpu7x", "4x4x4", None, 16, "2x2x1"),
]


@pytest.mark.parametrize(("generation", "topology", "per_host", "num_engines", "part"), PARTS)
def test_part_of_each_engine_is_a_slice_of_one_host(
    generation: str, topology: str, per_host: int | None, num_engines: int, part: str
) -> None:
    whole = slice_shape(generation, topology, per_host)
    found = engine_shape(whole, num_engines)
    assert (found.generation, found.topology, found.num_hosts) == (whole.generation, part, 1)
    assert found.num_chips * num_engines == whole.num_chips


@given(SHAPES, st.integers(1, 300))
def test_slice_is_divided_into_whole_hosts_or_parts_of_one_or_not_at_all(
    shape: SliceShape, num_engines: int
) -> None:
    refused = refusal(lambda: engine_shape(shape, num_engines))
    if refused is not None:
        assert [engine_shape(shape, int(choice)) for choice in refused.choices]
        return
    part = engine_shape(shape, num_engines)
    assert part.num_chips * num_engines == shape.num_chips
    assert part == shape or shape.chips_per_host % part.num_chips == 0


def test_number_of_engines_that_does_not_divide_a_slice_is_refused_with_those_that_do() -> None:
    refused = refusal(lambda: engine_shape(slice_shape("v6e", "2x4"), 3))
    assert str(refused) == (
        "a v6e 2x4 slice has no such number of equal parts (value 3); nearest allowed: 1, 2, 8"
    )
    assert refusal(lambda: engine_shape(slice_shape("v5p", "2x2x1"), 4)) is not None
