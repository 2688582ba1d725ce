"""Checks this host: chips, metadata server, ports. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from deployments.doctor.findings import Finding, Level, Unknown, error, note, ok, warning
from deployments.doctor.tpu_environment import host_shape
from serving.domain.topology import Generation, shapes
from serving.exporters.chips import HostChip
from serving.slices.local.notes import END_WITHIN_VARIABLE
from serving.tpu.host.judgement import HostLevel, judge_host
from serving.tpu.host.limits import HostLimits


@dataclass(frozen=True, slots=True)
class Chips:
    """The chips on the PCI bus, and the device nodes that this process may not open."""

    chips: tuple[HostChip, ...] = ()
    closed: tuple[str, ...] = ()
    has_bus: bool = True  # not on a machine without PCI


def check_chips(found: Chips | Unknown, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that there are the chips that the slice requires, and that we may use them."""
    if isinstance(found, Unknown):
        yield warning("chips", found.reason, "readable sysfs", "mount /sys into the container")
        return
    shape = host_shape(environment, len(found.chips) or None)
    if not found.chips:
        yield note("chips", "none on the PCI bus" if found.has_bus else "no PCI bus")
        return
    generations = sorted({chip.generation for chip in found.chips})
    words = f"{len(found.chips)} chips of {', '.join(generations)}"
    sizes = sorted({other.chips_per_host for other in shapes(generations[0])})
    allowed = sizes if shape is None else [shape.chips_per_host]
    if len(generations) > 1:
        yield error(
            "chips", words, "one generation", "replace the host: no machine type is like that"
        )
    elif shape is not None and shape.generation != generations[0]:
        yield error(
            "chips",
            words,
            f"{shape.generation}, as TPU_ACCELERATOR_TYPE says",
            "correct the variable",
        )
    elif len(found.chips) not in allowed:
        yield error(
            "chips",
            words,
            " or ".join(map(str, allowed)),
            "a chip has failed or is hidden: drain the slice and have the host replaced",
        )
    else:
        yield ok("chips", words)
    if found.closed:
        yield error(
            "device nodes",
            f"cannot open {', '.join(found.closed)}",
            "readable and writable for this user",
            "ask for google.com/tpu in the pod; on a TPU VM join the group that owns them",
        )


_LEVELS = {HostLevel.OK: Level.OK, HostLevel.WARN: Level.WARNING, HostLevel.FAIL: Level.ERROR}


def check_limits(
    limits: HostLimits, generation: Generation | None, *, is_tpu_host: bool
) -> Iterator[Finding]:
    """Checks what the host lets a process do. Where there are no chips, nothing is a fault."""
    for each in judge_host(limits, generation):
        if is_tpu_host:
            yield Finding(_LEVELS[each.level], each.what, each.found, each.allowed, each.fix)
        else:
            yield note(each.what, each.found)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The values of the metadata server. `None`: this host has no such value."""

    machine_type: str | None = None
    zone: str | None = None
    preempted: str | None = None


def check_metadata(
    found: Metadata | Unknown, environment: Mapping[str, str], chips: tuple[HostChip, ...]
) -> Iterator[Finding]:
    """Checks the metadata server: it announces a host's end, and has the machine type."""
    what = "metadata server"
    if isinstance(found, Unknown):
        if not chips:
            yield note(what, "none: this is no VM of Google Cloud")
            return
        yield warning(
            what,
            found.reason,
            "an answer: preemptions are announced there",
            "let pods reach 169.254.169.254 port 80, and GKE's metadata server if there is one",
        )
        return
    shape = host_shape(environment, len(chips) or None)
    machine = (found.machine_type or "").rpartition("/")[2]
    if shape is not None and chips and machine and machine != shape.gke_machine_type:
        yield error(
            what,
            f"machine type {machine}",
            f"{shape.gke_machine_type} for {shape.generation} {shape.topology}",
            "correct the machine type of the node pool or the topology of the worker group",
        )
        return
    if found.preempted == "TRUE":
        yield warning(what, "this host is being preempted", "", "nothing: its slice drains")
        return
    zone = (found.zone or "").rpartition("/")[2]
    words = " ".join(filter(None, (machine, zone))) or "answers"
    if found.preempted is None:
        # As GKE's does; then the hook of the pod has to.
        words += "; conceals preemptions"
        if END_WITHIN_VARIABLE in environment:
            words += f", this pod's hook tells {environment[END_WITHIN_VARIABLE]} s ahead"
    yield ok(what, words)


class Holder(StrEnum):
    """The process that holds a port."""

    NOBODY = "nobody"
    EXPECTED = "expected"  # what the port is for
    OTHER = "other"
    UNKNOWN = "unknown"  # taken, and its holder did not answer in time


@dataclass(frozen=True, slots=True)
class Port:
    """The state of a port of this machine: its purpose, holder, and the setting that moves it."""

    what: str
    number: int
    holder: Holder
    setting: str
    is_needed: bool = True  # here nothing works without it


def check_port(port: Port) -> Finding:
    """Checks that a port is free, or held by the program it is meant for."""
    what = f"port {port.number} ({port.what})"
    match port.holder:
        case Holder.NOBODY:
            return ok(what, "free")
        case Holder.EXPECTED:
            return ok(what, "answers")
        case Holder.UNKNOWN:
            return warning(what, "taken, and no answer in time", "free, or ours", port.setting)
        case Holder.OTHER:
            make = error if port.is_needed else warning
            return make(what, "taken by another program", "free, or ours", port.setting)
