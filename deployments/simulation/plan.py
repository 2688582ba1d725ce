"""Describes a simulated cluster: the form of its file, and the names in it.

Pure: reads no file, starts nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from serving.config.slices import MARKET_LABEL
from serving.domain.errors import ConfigError, Problem
from serving.domain.inventory import (
    ACCELERATOR_LABEL,
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    TOPOLOGY_LABEL,
    WORKER_ID_LABEL,
    ZONE_LABEL,
)
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL
from serving.domain.topology import SliceShape, TopologyError, slice_shape
from serving.slices.probe import FAULT_VARIABLE

_NAME = r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"


class UnknownSliceError(ValueError):
    """Reports that there is no such slice or host. The message lists the existing ones."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SimulatedSlices(_Section):
    """The slices of one kind."""

    name: Annotated[str, Field(pattern=_NAME)]
    """Slices are called `<name>-0`, `<name>-1` and so on, as KubeRay calls them."""
    compute_class: Annotated[str, Field(pattern=_NAME)]
    """Becomes the label `slicewise.io/compute-class`."""
    market: str | None = None
    """Becomes the label `ray.io/market-type`; left out, the compute class."""
    generation: str
    """TPU generation, such as v6e."""
    topology: str
    """Such as 4x4."""
    chips_per_host: int | None = None
    """Which of two machine shapes, where a topology has two."""
    count: Annotated[int, Field(ge=0, le=64)] = 1
    """How many there are."""
    appears_after_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """When they come into being, in seconds after the start of the cluster."""
    returns_after_s: Annotated[float, Field(ge=0, le=86_400)] | None = 30.0
    """When a lost slice is replaced, under its old name; `null`: never."""
    max_run_duration_s: Annotated[float, Field(gt=0, le=604_800)] | None = None
    """How long each runs before it is taken away, as flex-start slices are; `null`: for ever."""
    zone: str = "sim-a"
    """Becomes the label `ray.io/availability-zone`."""

    @field_validator("chips_per_host")
    @classmethod
    def _is_positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("at least 1")
        return value

    @property
    def shape(self) -> SliceShape:
        """The shape of each of them; raises `TopologyError` if there is none such."""
        return slice_shape(self.generation, self.topology, self.chips_per_host)

    def slice_name(self, index: int) -> str:
        """The name of one of them."""
        return f"{self.name}-{index}"


class FaultyHost(_Section):
    """The host whose chips fail the probe, until its slice is replaced."""

    slice: str
    """Name of its slice, such as `v6e-spot-0`."""
    worker_id: Annotated[int, Field(ge=0)] = 0
    """Which host of the slice."""
    fault: Literal["wrong_matmul", "hang", "crash", "missing_device", "small_hbm"]
    """What is wrong with it."""


class SimulationPlan(_Section):
    """The plan of a simulated cluster."""

    slices: Annotated[tuple[SimulatedSlices, ...], Field(min_length=1)]
    """The slices, by kind."""
    faulty_hosts: tuple[FaultyHost, ...] = ()
    """Hosts that fail the probe."""
    cpus_per_host: Annotated[float, Field(gt=0, le=1024)] = 2.0
    """CPUs that Ray believes each host to have. They are this machine's."""
    head_cpus: Annotated[float, Field(ge=0, le=1024)] = 2.0
    """The same for the head node, where gateways run; 0 keeps them off it."""
    gateway_hosts: Annotated[int, Field(ge=0, le=16)] = 0
    """Hosts without chips beside the head, as our manifests have them for gateways; without
    `control_hosts` their control processes are there too."""
    control_hosts: Annotated[int, Field(ge=0, le=16)] = 0
    """The same for control processes, where no gateway goes."""


def parse_plan(raw: Any) -> SimulationPlan:
    """The plan in `raw`, the contents of a YAML file.

    Raises:
        ConfigError: every problem, with its path.
    """
    try:
        plan = SimulationPlan.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(
            [
                Problem(".".join(map(str, problem["loc"])) or "(file)", problem["msg"], "")
                for problem in error.errors()
            ]
        ) from error
    problems = []
    for index, kind in enumerate(plan.slices):
        try:
            _ = kind.shape
        except TopologyError as error:
            problems.append(Problem(f"slices[{index}].topology", str(error), "", kind.topology))
    names = [kind.name for kind in plan.slices]
    problems += [
        Problem(f"slices[{at}].name", "given twice", "allowed: a name of its own", name)
        for at, name in enumerate(names)
        if name in names[:at]
    ]
    if problems:
        raise ConfigError(problems)
    return plan


def host_labels(kind: SimulatedSlices, slice_name: str, worker_id: int) -> dict[str, str]:
    """The labels that Ray, KubeRay and our manifests put on such a host."""
    return {
        ACCELERATOR_LABEL: kind.shape.ray_accelerator_type,
        SLICE_NAME_LABEL: slice_name,
        WORKER_ID_LABEL: str(worker_id),
        POD_TYPE_LABEL: kind.shape.ray_pod_type,
        TOPOLOGY_LABEL: kind.shape.topology,
        ZONE_LABEL: kind.zone,
        MARKET_LABEL: kind.market or kind.compute_class,
        COMPUTE_CLASS_LABEL: kind.compute_class,
    }


def host_resources(kind: SimulatedSlices, slice_name: str, worker_id: int) -> dict[str, float]:
    """The resources that Ray finds on such a host; worker 0 has its pod type's head resource."""
    shape = kind.shape
    resources: dict[str, float] = {
        "TPU": shape.chips_per_host,
        slice_name: 1,
        f"accelerator_type:{shape.ray_accelerator_type}": 1,
    }
    if worker_id == 0:
        resources[f"TPU-{shape.ray_pod_type}-head"] = 1
    return resources


def host_environment(
    kind: SimulatedSlices, slice_name: str, worker_id: int, fault: str | None = None
) -> dict[str, str]:
    """Returns what GKE, its device plugin and KubeRay's TPU webhook put into a pod's environment.

    `fault` is what is wrong with its chips, `None` for a sound host.
    """
    shape = kind.shape
    faulty = {} if fault is None else {FAULT_VARIABLE: fault}
    return faulty | {
        "TPU_NAME": slice_name,
        "TPU_WORKER_ID": str(worker_id),
        "TPU_TOPOLOGY": shape.topology,
        "TPU_ACCELERATOR_TYPE": shape.ray_pod_type,
    }
