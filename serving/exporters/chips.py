"""Finds the chip of the host that a value belongs to, for any name that its source gives it.

Owns the numbering: chips of the host count from 0 in the order of their PCI addresses, which is the
order of libtpu's device ids. libtpu numbers devices over the slice (a second host may have 404,
405, 412, 413), so an id is ranked among the host's. That is done once, from the full set: a new
ranking of the remaining ids would give a chip another's name as soon as one vanishes. Pure.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from serving.domain.topology import Generation, TopologyError, shapes, slice_shape
from serving.exporters.collector import PciBus

# PCI devices of Google's vendor id that are chips. Source: tpu-info 0.14.2 `device.py`, read
# 2026-11-21.
GOOGLE_VENDOR = "0x1ae0"
_GENERATIONS = {
    "0x005e": Generation.V4,
    "0x0062": Generation.V5P,
    "0x0063": Generation.V5E,
    "0x006f": Generation.V6E,
    "0x0076": Generation.TPU7X,
}


@dataclass(frozen=True, slots=True)
class HostChip:
    """The chip on the host's PCI bus. `address` has no function number: a chip may have several."""

    index: int
    address: str
    dev_path: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """The place of a device on the host, as labels name it.

    `core` is `None` where a chip is one device. `chip` is `None` where the device cannot be placed,
    and only then `device_id` is not.
    """

    chip: int | None
    core: int | None = None
    device_id: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The host's devices by their ids within the slice, in order; no ids while none is known."""

    devices_per_chip: int = 1
    num_devices: int | None = None  # on the host; None if unknown
    ids: tuple[int, ...] = ()

    def by_id(self, device: int) -> DeviceLocation:
        """Returns the place of a device that is numbered within the slice."""
        if device not in self.ids:
            return DeviceLocation(None, device_id=device)
        return self.by_rank(self.ids.index(device))

    def by_rank(self, rank: int) -> DeviceLocation:
        """Returns the place of a device that is numbered within the host."""
        if self.devices_per_chip == 1:
            return DeviceLocation(rank)
        return DeviceLocation(*divmod(rank, self.devices_per_chip))

    def by_ordinals(self, ordinals: Collection[int]) -> dict[int, DeviceLocation]:
        """Returns the places of devices, all numbered within the slice or all within the host."""
        if set(ordinals) <= set(self.ids):
            return {ordinal: self.by_id(ordinal) for ordinal in ordinals}
        if self.ids and max(ordinals) < len(self.ids):
            return {ordinal: self.by_rank(ordinal) for ordinal in ordinals}
        return {ordinal: DeviceLocation(None, device_id=ordinal) for ordinal in ordinals}

    def by_position(self, positions: Collection[int]) -> dict[int, DeviceLocation] | None:
        """Returns the places of entries numbered by chips or by devices; `None` for too many."""
        highest = max(positions, default=-1)
        if self.num_devices is None or highest < self.num_devices // self.devices_per_chip:
            return {position: DeviceLocation(position) for position in positions}
        if highest < self.num_devices:
            return {position: self.by_rank(position) for position in positions}
        return None


class TooManyDevicesError(ValueError):
    """The sources gave more devices than the host has. Label the values by device id only."""


def learn_devices(known: DeviceMap, seen: Collection[int]) -> DeviceMap:
    """Returns the map after the devices in `seen` gave values, by their ids within the slice.

    A full set is believed at once. A part of it keeps the ranks that it had. If no full set came
    yet, the part has ranks only where the ids themselves can be ranks.

    Raises:
        TooManyDevicesError: there are more than the host has.
    """
    ids = tuple(sorted(seen))
    if set(ids) <= set(known.ids):
        return known
    if known.num_devices is None or len(ids) == known.num_devices:
        return DeviceMap(known.devices_per_chip, known.num_devices, ids)
    if len(ids) > known.num_devices:
        raise TooManyDevicesError(f"{len(ids)} devices, but the host has {known.num_devices}")
    if ids[-1] < known.num_devices:
        every = tuple(range(known.num_devices))
        return DeviceMap(known.devices_per_chip, known.num_devices, every)
    return DeviceMap(known.devices_per_chip, known.num_devices)


def sized(known: DeviceMap, devices_per_chip: int, num_chips: int | None) -> DeviceMap:
    """Returns the map of a host with that many chips; forgets what it knew of another size."""
    num_devices = None if num_chips is None else num_chips * devices_per_chip
    if (known.devices_per_chip, known.num_devices) == (devices_per_chip, num_devices):
        return known
    return DeviceMap(devices_per_chip, num_devices)


def chips_on_bus(bus: PciBus) -> tuple[HostChip, ...]:
    """Returns the chips among the functions, in order of address. Google has other devices too."""
    first_functions: dict[str, tuple[Generation, str | None]] = {}
    for function in sorted(bus.functions, key=lambda pci_function: pci_function.address):
        generation = _GENERATIONS.get(function.device)
        if generation is not None:
            base = function.address.rpartition(".")[0] or function.address
            first_functions.setdefault(base, (generation, function.iommu_group))
    return tuple(
        HostChip(index, base, _dev_path(index, group), generation)
        for index, (base, (generation, group)) in enumerate(first_functions.items())
    )


def _dev_path(index: int, iommu_group: str | None) -> str:
    """Returns the path of a chip: chips use VFIO since v5 and had their own driver before."""
    return f"/dev/accel{index}" if iommu_group is None else f"/dev/vfio/{iommu_group}"


def named_generation(accelerator: str) -> Generation | None:
    """Returns the generation that an accelerator's name means: GKE's, Ray's pod type or ours."""
    wanted = accelerator.lower()
    for generation in Generation:
        names = {str(generation)}
        for shape in shapes(generation):
            names |= {shape.gke_accelerator, shape.ray_pod_type}
        if wanted in names:
            return generation
    return None


def chips_of_host(generation: Generation | None, topology: str) -> int | None:
    """Returns the number of chips on each host of such a slice; `None` where there is a choice."""
    if generation is None:
        return None
    try:
        name = slice_shape(generation, topology).topology
    except TopologyError:
        return None
    sizes = {shape.chips_per_host for shape in shapes(generation) if shape.topology == name}
    return sizes.pop() if len(sizes) == 1 else None


def devices_per_chip(generation: Generation | None) -> int:
    """Returns the number of devices that JAX lists for a chip; 1 for an unknown generation."""
    return 1 if generation is None else shapes(generation)[0].devices_per_chip


def index_of(device_id: str, chips: Iterable[HostChip]) -> int | None:
    """Returns a chip's index from Kubernetes' id: `accel0`, `0`, a PCI address; else `None`."""
    number = device_id.removeprefix("accel")
    if number.isascii() and number.isdigit():
        return int(number)
    by_address = {chip.address: chip.index for chip in chips}
    base = device_id.partition(".")[0]
    return by_address.get(base)
