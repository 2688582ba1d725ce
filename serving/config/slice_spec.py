"""The values that a slice replica needs to request its slice. Values only; travels through Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.domain.inventory import SliceRequest
from serving.domain.limits import PROBE_TIMEOUT_S, LinkEncryption
from serving.domain.topology import SliceShape, engine_shape
from serving.telemetry.process_log import DEFAULT_STYLE, LogStyle

# The folder in which a host's TPU exporter finds what runs on the chips (`--run-dir`).
RUN_DIR_VARIABLE = "SLICEWISE_RUN_DIR"


@dataclass(frozen=True, slots=True)
class Work:
    """The owner of a slice while it is held, by the names that metrics have."""

    model: str
    deployment: str
    replica: str


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """The kind of slice that a replica requests, and how the replica uses a slice of that kind.

    `node_labels` are the labels that its hosts have by compute class and zone. `drain_notice_s` is
    the time before a scheduled end at which it starts to drain, or its time if no end was named.
    `max_run_duration_s` is the longest run of its hosts from their start; `None`: for ever. After
    `patience_s` of waiting the wait is called too long; `None`: never. `probe_timeout_s` of 0 means
    that it is not probed. `cpus_per_host` are reserved on each host for the engine, whose processes
    get `engine_env`. `encryption` is that of links, for the streams from its hosts. `work` is its
    owner, `None` before a replica reports one. `num_slices` of the kind are held together, or none.
    Each is divided among `num_engines`. Times are seconds.
    """

    compute_class: str
    shape: SliceShape
    node_labels: Mapping[str, str] = field(default_factory=dict)
    drain_notice_s: float = 15.0
    max_run_duration_s: float | None = None
    patience_s: float | None = None
    num_slices: int = 1
    num_engines: int = 1
    probe_timeout_s: float = PROBE_TIMEOUT_S
    cpus_per_host: float = 0.1
    listens_on_loopback: bool = False
    encryption: LinkEncryption = LinkEncryption.AUTO
    log_style: LogStyle = DEFAULT_STYLE
    engine_env: Mapping[str, str] = field(default_factory=dict)
    work: Work | None = None

    @property
    def engine_shape(self) -> SliceShape:
        """The shape of what one engine has of a slice."""
        return engine_shape(self.shape, self.num_engines)


def slice_request(spec: SliceSpec) -> SliceRequest:
    """Returns the kind of slice that a replica may take, and how many of it."""
    shape = spec.shape
    return SliceRequest(
        compute_class=spec.compute_class,
        pod_type=shape.ray_pod_type,
        topology=shape.topology,
        num_hosts=shape.num_hosts,
        chips_per_host=shape.chips_per_host,
        labels=dict(spec.node_labels),
        num_slices=spec.num_slices,
    )
