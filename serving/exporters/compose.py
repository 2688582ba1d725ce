"""Composes the page of one scrape from the samples of its collectors.

Owns which source wins, who owns a chip, and what each collector's success means. Does not own
decoding, nor the text of the page (`exposition`). Pure: the numbering of devices, which one scrape
has to remember for the next, comes in and goes out.

A value that no source gave in this scrape is not on the page.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from serving.exporters.chips import (
    DeviceLocation,
    DeviceMap,
    HostChip,
    TooManyDevicesError,
    chips_of_host,
    chips_on_bus,
    devices_per_chip,
    learn_devices,
    named_generation,
    sized,
)
from serving.exporters.collector import (
    Code,
    CollectorSample,
    LibtpuAnswers,
    PciBus,
    PluginPage,
    PodList,
    SdkValues,
    WorkloadFiles,
)
from serving.exporters.host_decode import decode_plugin_page, decode_pods, decode_sdk_values
from serving.exporters.identity import Identity
from serving.exporters.libtpu_service.decode import decode_libtpu
from serving.exporters.series import Decoded, MetricPoint, Series, SeriesCollector
from serving.telemetry.metric_names import ALL, Scope


@dataclass(frozen=True, slots=True)
class HostDescription:
    """The facts about the host that are known without a source."""

    identity: Identity
    expected_chips: int | None = None  # None: the topology decides


@dataclass(frozen=True, slots=True)
class CollectorOutcome:
    """The outcome of one collector. `problems` are the counts of this scrape, by code."""

    collector: str
    target: str
    duration_s: float
    is_success: bool
    problems: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScrapePage:
    """The content of a scrape, the outcomes, and the device map for the next one."""

    series: tuple[Series, ...]
    outcomes: tuple[CollectorOutcome, ...]
    devices: DeviceMap


@dataclass(slots=True)
class _DecodedSample:
    """The decoded sample. `reporting` are chips, or ids of unplaced devices, with a value in it."""

    sample: CollectorSample
    decoded: Decoded
    reporting: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Host:
    """The host's chips, empty unless PCI shows all of them. A number is `None` if unknown."""

    chips: tuple[HostChip, ...]
    num_detected: int | None
    expected: int | None
    devices: DeviceMap


def compose_page(
    samples: Sequence[CollectorSample], facts: HostDescription, known: DeviceMap
) -> ScrapePage:
    """Composes a page; preferred samples come first, `known` is the last page's device map."""
    has_libtpu = any(sample.collector == "libtpu" for sample in samples)
    sources = [
        _DecodedSample(sample, _decode(sample, is_only_source=not has_libtpu)) for sample in samples
    ]
    host = _inspect_host(sources, facts, known)
    owners = _find_owners(sources, host)
    collected = SeriesCollector(facts.identity.labels)
    for rank, source in enumerate(sources):
        for point, location in _located(source.decoded, host.devices):
            if isinstance(point.device, int) and location is not None:
                source.reporting.add(point.device if location.chip is None else location.chip)
            scope_labels = _scope_labels(point, location, source.sample, owners)
            problem = collected.add(point, scope_labels, rank)
            if problem is not None:
                source.decoded.problems[problem] += 1
    _describe_host(collected, host, owners, sources)
    return ScrapePage(collected.series, tuple(map(_outcome, sources)), host.devices)


def _decode(sample: CollectorSample, *, is_only_source: bool) -> Decoded:
    match sample.raw:
        case LibtpuAnswers() as answers:
            return decode_libtpu(answers)
        case PluginPage() as page:
            return decode_plugin_page(page, is_only_source=is_only_source)
        case SdkValues() as sdk:
            return decode_sdk_values(sdk)
        case PciBus() | PodList() | WorkloadFiles() | None:
            return Decoded()
        case _ as unknown:
            assert_never(unknown)


def _inspect_host(
    sources: Sequence[_DecodedSample], facts: HostDescription, known: DeviceMap
) -> _Host:
    buses = [source.sample.raw for source in sources if isinstance(source.sample.raw, PciBus)]
    chips = chips_on_bus(buses[0]) if buses else None
    generation = chips[0].generation if chips else named_generation(facts.identity["accelerator"])
    expected = facts.expected_chips
    if expected is None:
        expected = chips_of_host(generation, facts.identity["topology"])
    num_chips = expected if expected is not None else len(chips or ()) or None
    # An order in which some are missing shows nothing of the others' places.
    ordered = chips if chips is not None and len(chips) == num_chips else ()
    devices = sized(known, devices_per_chip(generation), num_chips)
    speaking = [source for source in sources if _device_ids(source.decoded)]
    # The runtime processes of a host have its devices together.
    seen = {device for source in speaking for device in _device_ids(source.decoded)}
    if seen:
        try:
            devices = learn_devices(devices, seen)
        except TooManyDevicesError:
            devices = DeviceMap(devices.devices_per_chip, devices.num_devices)
            for source in speaking:
                source.decoded.problems[Code.CHIP_COUNT] += 1
    return _Host(ordered, None if chips is None else len(chips), expected, devices)


def _device_ids(decoded: Decoded) -> set[int]:
    return {point.device for point in decoded.points if point.device is not None}


def _find_owners(sources: Sequence[_DecodedSample], host: _Host) -> Mapping[int, Mapping[str, str]]:
    """Returns workload labels by chip. Kubernetes knows the pod, our process its replica."""
    owners: dict[int, dict[str, str]] = {}
    num_devices = host.devices.num_devices or len(host.devices.ids)
    every_chip = tuple(range(num_devices // host.devices.devices_per_chip))
    for source in sources:
        raw = source.sample.raw
        if isinstance(raw, PodList):
            pods, problems = decode_pods(raw, host.chips)
            source.decoded.problems.update(problems)
            for chip, pod in pods.items():
                owners.setdefault(chip, {}).update(
                    namespace=pod.namespace, pod=pod.name, container=pod.container
                )
        elif isinstance(raw, WorkloadFiles):
            for workload in raw.workloads:
                for chip in every_chip if workload.chips is None else workload.chips:
                    owners.setdefault(chip, {}).update(
                        model=workload.model,
                        deployment=workload.deployment,
                        replica=workload.replica,
                    )
            if raw.unreadable:
                source.decoded.problems[Code.UNREADABLE] += raw.unreadable
    return owners


def _located(
    decoded: Decoded, devices: DeviceMap
) -> Iterable[tuple[MetricPoint, DeviceLocation | None]]:
    """Yields every point and its location; `None` for one of the whole host."""
    for point in decoded.points:
        yield point, None if point.device is None else devices.by_id(point.device)
    ordinals = {point.device for point in decoded.ordinals if point.device is not None}
    locations = devices.by_ordinals(ordinals) if ordinals else {}
    for point in decoded.ordinals:
        if point.device is not None:
            yield point, locations[point.device]
    # A source may number chips in one metric and devices in another.
    for metric in dict.fromkeys(point.metric for point in decoded.host_points):
        points = {
            point.device: point
            for point in decoded.host_points
            if point.metric == metric and point.device is not None
        }
        positions = devices.by_position(points.keys())
        if positions is None:
            decoded.problems[Code.CHIP_COUNT] += 1
            continue
        for position, point in points.items():
            yield point, positions[position]


def _scope_labels(
    point: MetricPoint,
    location: DeviceLocation | None,
    sample: CollectorSample,
    owners: Mapping[int, Mapping[str, str]],
) -> Mapping[str, str]:
    if ALL[point.metric].scope == Scope.COLLECTOR:
        return {"collector": sample.collector, "target": sample.target}
    return {} if location is None else _location_labels(location, owners)


def _location_labels(
    location: DeviceLocation, owners: Mapping[int, Mapping[str, str]]
) -> dict[str, str]:
    if location.chip is None:
        return {"device_id": f"{location.device_id}"}
    core = {} if location.core is None else {"core": f"{location.core}"}
    return {"chip": f"{location.chip}", **core, **owners.get(location.chip, {})}


def _describe_host(
    collected: SeriesCollector,
    host: _Host,
    owners: Mapping[int, Mapping[str, str]],
    sources: Sequence[_DecodedSample],
) -> None:
    if host.expected is not None:
        collected.add_own("tpu_chips_expected", host.expected)
    if host.num_detected is not None:
        collected.add_own("tpu_chips_detected", host.num_detected)
    reporting: dict[str, set[int]] = {}
    for source in sources:
        if source.reporting:
            reporting.setdefault(source.sample.collector, set()).update(source.reporting)
    for name, locations in reporting.items():
        collected.add_own("tpu_chips_reporting", len(locations), source=name)
    by_index = {chip.index: chip for chip in host.chips}
    named = {location.chip for location in map(host.devices.by_id, host.devices.ids)}
    for device in host.devices.ids:
        location = host.devices.by_id(device)
        labels = {**_location_labels(location, owners), "device_id": f"{device}"}
        collected.add_own(
            "tpu_chip_info", 1, **labels, **_chip_names(by_index.get(location.chip or 0))
        )
    for chip in by_index.values():
        if chip.index not in named:
            labels = _location_labels(DeviceLocation(chip.index), owners)
            collected.add_own("tpu_chip_info", 1, **labels, **_chip_names(chip))


def _chip_names(chip: HostChip | None) -> dict[str, str]:
    if chip is None:
        return {}
    return {"pci": chip.address, "dev_path": chip.dev_path, "generation": chip.generation}


def _outcome(source: _DecodedSample) -> CollectorOutcome:
    sample = source.sample
    problems = Counter(source.decoded.problems)
    if sample.code != Code.OK:
        problems[sample.code] += 1
    if isinstance(sample.raw, LibtpuAnswers) and sample.raw.failures:
        problems[_code_of_failures(sample.raw)] += 1
    elif isinstance(sample.raw, LibtpuAnswers | PluginPage | SdkValues) and not source.reporting:
        problems[Code.EMPTY] += 1
    return CollectorOutcome(
        sample.collector, sample.target, sample.duration_s, not problems, dict(problems)
    )


def _code_of_failures(answers: LibtpuAnswers) -> str:
    """Returns PARTIAL if something is served; else the commonest failure."""
    if answers.answers:
        return Code.PARTIAL
    return Counter(answers.failures.values()).most_common(1)[0][0]
