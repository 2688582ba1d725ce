"""The slices that exist: generations, topologies, chips, hosts, devices and every owner's names.

Owns the one table of slice shapes and all conversions between chips, hosts, cores and devices;
nothing else reads a number out of a pod type. A topology stands here if Google makes it and Ray
2.60 reserves it, for Ray refuses any other when a replica is already starting. Twisted tori are
left out: Ray has no name for them. Does not own prices, zones or what is free. Pure.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

GIB = 1024**3

_NUM_CHOICES = 3
_TOPOLOGY_FORM = re.compile(r"[1-9][0-9]{0,2}(x[1-9][0-9]{0,2}){1,3}")


class Generation(StrEnum):
    """The generations of TPU."""

    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"  # Trillium
    TPU7X = "tpu7x"  # Ironwood


_V4, _V5E, _V5P, _V6E, _7X = Generation

# Source: cluster-autoscaler `machinetypes/deprecated_tpu_config.go` at b37dc8a6 (one host), xpk
# `system_characteristics.py` at 02b0c092 (more), Ray 2.60 `tpu.py`, whose 2x8 the others lack; read
# 2026-11-21.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# What is smaller than a cube of 4x4x4 chips. Source: xpk and Ray as above, read 2026-11-21.
_BELOW_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_CUBE_EDGE = 4
# The largest topologies of whole cubes; all have A <= B <= C, each a multiple of 4.
_LARGEST = {
    # Source: Ray as above, read 2026-11-21. xpk goes on to 8x16x16, which Ray refuses.
    _V4: (12, 12, 16),
    # Source: Cloud TPU page v5p ("maximum v5p shape") and Ray as above, read 2026-11-21.
    _V5P: (16, 16, 24),
}
# Source: Ray as above, read 2026-11-21. xpk knows 1x1x1 and whole cubes up to the 9216 chips of
# Cloud TPU page TPU7x; Ray refuses those.
_7X_CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

# JAX devices per chip. Source: tpu-info 0.14.2 `device.py`, read 2026-11-21.
_DEVICES_PER_CHIP = {_V4: 1, _V5E: 1, _V5P: 1, _V6E: 1, _7X: 2}
# Memory, less the 1 GiB of v5p that its runtime keeps. Source: tpu-info as above, read 2026-11-21.
_HBM_BYTES_PER_CHIP = {
    _V4: 32 * GIB,
    _V5E: 16 * GIB,
    _V5P: 95 * GIB,
    _V6E: 32 * GIB,
    _7X: 192 * GIB,
}
# TensorCores, which pod types count. Source: Ray as above, read 2026-11-21.
_CORES_PER_CHIP = {_V4: 2, _V5E: 1, _V5P: 2, _V6E: 1, _7X: 2}
# Chips of one host in a slice of several. Source: xpk and Ray as above, read 2026-11-21.
_CHIPS_OF_ONE_AMONG_HOSTS = 4
# GKE's machine types by chips. Source: cluster-autoscaler as above, read 2026-11-21.
_MACHINE_TYPES: Mapping[Generation, Mapping[int, str]] = {
    _V4: {4: "ct4p-hightpu-4t"},
    _V5E: {1: "ct5lp-hightpu-1t", 4: "ct5lp-hightpu-4t", 8: "ct5lp-hightpu-8t"},
    _V5P: {4: "ct5p-hightpu-4t"},
    _V6E: {1: "ct6e-standard-1t", 4: "ct6e-standard-4t", 8: "ct6e-standard-8t"},
    _7X: {4: "tpu7x-standard-4t"},
}
# Label `cloud.google.com/gke-tpu-accelerator`. Source: xpk as above, read 2026-11-21.
_GKE_ACCELERATORS = {
    _V4: "tpu-v4-podslice",
    _V5E: "tpu-v5-lite-podslice",
    _V5P: "tpu-v5p-slice",
    _V6E: "tpu-v6e-slice",
    _7X: "tpu7x",
}
# How Ray spells a generation. Source: Ray as above, read 2026-11-21.
_RAY_NAMES = {_V4: "v4", _V5E: "v5litepod", _V5P: "v5p", _V6E: "v6e", _7X: "v7x"}


# Every value of Ray's node label `ray.io/accelerator-type` that means a TPU host.
TPU_ACCELERATOR_TYPES = tuple(f"TPU-{name.upper()}" for name in _RAY_NAMES.values())


class TopologyError(ValueError):
    """The slice, or the use of it, does not exist. Change the value to one of `choices`.

    The choices are the nearest ones.
    """

    def __init__(self, complaint: str, value: str, choices: tuple[str, ...]) -> None:
        super().__init__(complaint, value, choices)
        self.complaint = complaint
        self.value = value
        self.choices = choices

    def __str__(self) -> str:
        """Returns the complaint, the value, and the nearest choices."""
        return f"{self.complaint} (value {self.value}); nearest allowed: {', '.join(self.choices)}"


@dataclass(frozen=True, slots=True)
class SliceShape:
    """The shape of a slice that exists. Only `slice_shape` and `shapes` make one.

    `topology` is as GKE and Ray spell it; `chips_per_host` is one of their machine types'.
    """

    generation: Generation
    topology: str
    chips_per_host: int

    @property
    def num_chips(self) -> int:
        """The number of chips, which are what is paid for."""
        return math.prod(_dimensions(self.topology))

    @property
    def num_hosts(self) -> int:
        """The number of TPU VMs, which are GKE nodes, Ray nodes and bundles."""
        return self.num_chips // self.chips_per_host

    @property
    def devices_per_chip(self) -> int:
        """The number of devices that JAX lists for one chip."""
        return _DEVICES_PER_CHIP[self.generation]

    @property
    def num_devices(self) -> int:
        """The number of devices that JAX lists over all hosts."""
        return self.num_chips * self.devices_per_chip

    @property
    def cores_per_chip(self) -> int:
        """The TensorCores of one chip, which pod types count; JAX may list fewer devices."""
        return _CORES_PER_CHIP[self.generation]

    @property
    def hbm_bytes_per_chip(self) -> int:
        """The memory of one chip that programs may use."""
        return _HBM_BYTES_PER_CHIP[self.generation]

    @property
    def hbm_bytes_per_device(self) -> int:
        """The memory of one device that programs may use; each has its own part of the chip's."""
        return self.hbm_bytes_per_chip // self.devices_per_chip

    @property
    def gke_accelerator(self) -> str:
        """The value of GKE's node label `cloud.google.com/gke-tpu-accelerator`."""
        return _GKE_ACCELERATORS[self.generation]

    @property
    def gke_machine_type(self) -> str:
        """The machine type of every host."""
        return _MACHINE_TYPES[self.generation][self.chips_per_host]

    @property
    def ray_accelerator_type(self) -> str:
        """The value of Ray's node label `ray.io/accelerator-type`, such as `TPU-V5LITEPOD`."""
        return f"TPU-{_RAY_NAMES[self.generation].upper()}"

    @property
    def ray_pod_type(self) -> str:
        """The value of Ray's `ray.io/tpu-pod-type`, such as `v6e-16`. The number counts cores."""
        num_cores = self.num_chips * self.cores_per_chip
        return f"{_RAY_NAMES[self.generation]}-{num_cores}"


def slice_shape(generation: str, topology: str, chips_per_host: int | None = None) -> SliceShape:
    """Returns the slice of that topology.

    `chips_per_host` of `None` takes the larger host where there are two, for v5e and v6e 2x4 one
    host of 8 chips: no host can be lost alone then, and Ray assumes the same. Axes of length 1 at
    the end may be left out or added: `2x2` of v5p is its `2x2x1`, `4x4x1` of v6e its `4x4`.

    Raises:
        TopologyError: there is no such slice.
    """
    known = _known_generation(generation)
    name = _known_topology(known, topology)
    sizes = _host_sizes(known, name)
    if chips_per_host is None:
        return SliceShape(known, name, sizes[0])
    if chips_per_host not in sizes:
        raise TopologyError(
            f"no host of a {known} {name} slice has that many chips",
            f"{chips_per_host}",
            tuple(map(str, sorted(sizes))),
        )
    return SliceShape(known, name, chips_per_host)


@cache
def shapes(generation: str) -> tuple[SliceShape, ...]:
    """Returns every slice of a generation, by chips; of one topology the default host first.

    Raises:
        TopologyError: there is no such generation.
    """
    known = _known_generation(generation)
    every = (
        SliceShape(known, topology, size)
        for topology in _topologies(known)
        for size in _host_sizes(known, topology)
    )
    return tuple(sorted(every, key=lambda shape: (shape.num_chips, _dimensions(shape.topology))))


def engine_shape(shape: SliceShape, num_engines: int) -> SliceShape:
    """Returns the part of a slice that each of `num_engines` on it has, as a slice of its own.

    A part is whole chips of one host, as many as a slice of one host may have: what an engine does
    on such a slice it does here. One engine has the whole slice.

    Raises:
        TopologyError: the slice cannot be divided so.
    """
    if num_engines == 1:
        return shape
    parts = engine_parts(shape)
    if num_engines in parts:
        return parts[num_engines]
    choices = ("1", *(str(count) for count in sorted(parts)))
    complaint = f"a {shape.generation} {shape.topology} slice has no such number of equal parts"
    raise TopologyError(complaint, f"{num_engines}", choices)


def engine_parts(shape: SliceShape) -> dict[int, SliceShape]:
    """Returns the part of each of several engines on a slice, by their number, fewest first."""
    alone = {each.num_chips: each for each in shapes(shape.generation) if each.num_hosts == 1}
    return {
        shape.num_chips // num_chips: part
        for num_chips, part in sorted(alone.items(), reverse=True)
        if shape.chips_per_host % num_chips == 0 and num_chips < shape.num_chips
    }


def parallelism_choices(shape: SliceShape) -> tuple[tuple[int, int], ...]:
    """Returns every (tensor, pipeline) size that uses the whole slice, fewest stages first.

    Sizes count devices, not chips. Over several hosts a stage is one host or there is one stage,
    because each stage is a JAX cluster of its own on its host; on one host a stage is whole chips,
    all of which it sees.
    Source: tpu-inference 0.32.0 `worker/tpu_worker.py` and `executors/`, read 2026-11-21.
    """
    if shape.num_hosts > 1:
        stages = [1, shape.num_hosts]
    else:
        stages = [count for count in range(1, shape.num_chips + 1) if shape.num_chips % count == 0]
    return tuple(
        (shape.num_devices // count, count) for count in stages if sees_whole_stages(shape, count)
    )


def sees_whole_stages(shape: SliceShape, num_stages: int) -> bool:
    """Returns whether each of so many pipeline stages would see all the devices it needs.

    tpu-inference gives a stage a chip for as many devices as a chip has cores. On v4 and v5p two
    cores are one device, so that a stage of more than one device sees half of its chips.
    Source: its 0.32.0 `tpu_info.py` and `worker/tpu_worker.py`, read 2026-11-29.
    """
    if num_stages <= 1:
        return True
    num_devices = shape.num_devices // num_stages
    num_chips = math.ceil(num_devices / shape.cores_per_chip)
    return num_chips * shape.devices_per_chip >= num_devices


def check_parallelism(shape: SliceShape, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Refuses sizes with which an engine would not use the whole slice, stage by stage.

    Raises:
        TopologyError: the sizes leave devices idle, ask for more, or split a host.
    """
    choices = parallelism_choices(shape)
    if (tensor_parallel, pipeline_parallel) in choices:
        return
    name = f"{shape.generation} {shape.topology} slice"
    if tensor_parallel * pipeline_parallel != shape.num_devices:
        complaint = f"tensor x pipeline is not the {shape.num_devices} devices of a {name}"
    elif not sees_whole_stages(shape, pipeline_parallel):
        complaint = f"a pipeline stage of a {name} would see half of its chips"
    elif shape.num_hosts > 1:
        complaint = f"a pipeline stage of a {name} is one host, or all of them"
    else:
        complaint = f"a pipeline stage of a {name} is one chip or more"
    asked = (tensor_parallel, pipeline_parallel)
    nearest = sorted(choices, key=lambda pair: sum(map(_ratio, pair, asked)))[:_NUM_CHOICES]
    raise TopologyError(
        complaint,
        f"{tensor_parallel} x {pipeline_parallel}",
        tuple(f"{tensor} x {pipeline}" for tensor, pipeline in nearest),
    )


def _known_generation(name: str) -> Generation:
    try:
        return Generation(name)
    except ValueError:
        raise TopologyError("unknown generation", name, tuple(Generation)) from None


def _known_topology(generation: Generation, written: str) -> str:
    """Returns the topology as GKE spells it."""
    name = written.strip().lower()
    known = _topologies(generation)
    if not _TOPOLOGY_FORM.fullmatch(name):
        complaint = "not a topology: chips along each axis, joined by x"
        raise TopologyError(complaint, written, known[:_NUM_CHOICES])
    dimensions = _dimensions(name)
    num_axes = len(_dimensions(known[0]))
    while len(dimensions) > num_axes and dimensions[-1] == 1:
        dimensions = dimensions[:-1]
    dimensions += (1,) * (num_axes - len(dimensions))
    name = "x".join(map(str, dimensions))
    if name not in known:
        complaint = f"no {generation} slice of this topology can be reserved"
        raise TopologyError(complaint, written, _nearest_topologies(known, dimensions))
    return name


def _nearest_topologies(known: tuple[str, ...], asked: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the nearest by chips, then by axes, smallest first; only swapped axes if any fit."""

    def distance(name: str) -> tuple[float, float]:
        dimensions = sorted(_dimensions(name))
        by_chips = _ratio(math.prod(dimensions), math.prod(asked))
        return by_chips, sum(map(_ratio, dimensions, sorted(asked)))

    swapped = tuple(name for name in known if sorted(_dimensions(name)) == sorted(asked))
    nearest = sorted(known, key=distance)[:_NUM_CHOICES]
    return swapped or tuple(name for name in known if name in nearest)


@cache
def _topologies(generation: Generation) -> tuple[str, ...]:
    """Returns all topologies of a generation, ordered by chips."""
    match generation:
        case Generation.V5E | Generation.V6E:
            return _FLAT
        case Generation.TPU7X:
            return (*_BELOW_A_CUBE, *_7X_CUBES)
        case Generation.V4 | Generation.V5P:
            cubes = sorted(
                _whole_cubes(_LARGEST[generation]), key=lambda abc: (math.prod(abc), abc)
            )
            return (*_BELOW_A_CUBE, *("x".join(map(str, abc)) for abc in cubes))


def _whole_cubes(largest: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    for a in range(_CUBE_EDGE, largest[0] + 1, _CUBE_EDGE):
        for b in range(a, largest[1] + 1, _CUBE_EDGE):
            for c in range(b, largest[2] + 1, _CUBE_EDGE):
                yield a, b, c


def _host_sizes(generation: Generation, topology: str) -> tuple[int, ...]:
    """Returns the chips per host with which this topology exists, the default first."""
    num_chips = math.prod(_dimensions(topology))
    alone = (num_chips,) if num_chips in _MACHINE_TYPES[generation] else ()
    is_large = num_chips > _CHIPS_OF_ONE_AMONG_HOSTS
    return (*alone, *((_CHIPS_OF_ONE_AMONG_HOSTS,) if is_large else ()))


def _dimensions(topology: str) -> tuple[int, ...]:
    return tuple(int(length) for length in topology.split("x"))


def _ratio(one: int, other: int) -> float:
    """Returns the distance of two sizes: 0 if equal, 1 if one is twice the other."""
    return abs(math.log2(max(1, one) / max(1, other)))
