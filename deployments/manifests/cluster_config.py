"""Defines the part of a values file that describes the GKE cluster.

Owns the fields under `cluster:`. Repeats nothing of the rest of the file: models, slices, compute
classes, replicas and drain times are the application's. Pure.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from deployments.manifests.hosts.config import HostConfig
from serving.config.sections import STRICT_SECTION, Items
from serving.config.slices import ComputeClassName

# KubeRay appends to the name of a RayService, and what comes of it has to fit a label of 63.
MAX_NAME = 30
_NAME_WORDS = f"lower-case letters, digits and inner `-`, a letter first, up to {MAX_NAME}"
ShortName = Annotated[
    str,
    Field(
        pattern=rf"^[a-z]([a-z0-9-]{{0,{MAX_NAME - 2}}}[a-z0-9])?$",
        json_schema_extra={"allowed": _NAME_WORDS},
    ),
]
ObjectName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$",
        json_schema_extra={"allowed": "the name of a Kubernetes object, up to 63 characters"},
    ),
]
Zone = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9]*-[a-z0-9]+-[a-z0-9]+$",
        json_schema_extra={"allowed": "a zone of Google Cloud, such as `us-east5-b`"},
    ),
]
Image = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9][a-zA-Z0-9./_-]*(:[0-9]+/[a-zA-Z0-9./_-]+)?"
        r"(:[a-zA-Z0-9._-]+|@sha256:[0-9a-f]{64})$",
        json_schema_extra={"allowed": "an image with a tag or a digest"},
    ),
]


class _Section(BaseModel):
    model_config = STRICT_SECTION


class Provisioning(StrEnum):
    """Who makes node pools."""

    AUTO = "auto"  # GKE, from the rules of the ComputeClass, when a slice is asked for
    NODE_POOLS = "node-pools"  # you, with the rendered script; GKE scales what there is


class UpgradeKind(StrEnum):
    """What a change of the Ray cluster itself does. A change of the application never needs one."""

    IN_PLACE = "in_place"  # nothing, until you replace pods or clusters yourself
    NEW_CLUSTER = "new_cluster"  # a complete second cluster, then the switch
    INCREMENTAL = "incremental"  # a second cluster, and the switch in steps; needs Gateway API


class ImagesConfig(_Section):
    """Container images; by digest, if a rollout has to be what was tested."""

    cpu: Image
    """Head, gateways, slice provisioner and exporter."""
    tpu: Image
    """Hosts of slices."""


class OwnRedisConfig(_Section):
    """A Redis of one pod with a disk, made with everything else."""

    image: Image
    """An image that has `redis-server` and `redis-cli`, such as `redis:7.4`."""
    storage_gib: Annotated[int, Field(ge=1, le=1024)] = 8
    """Its disk, in GiB."""
    storage_class: ObjectName | None = None
    """StorageClass of the disk; the cluster's default one, when left out."""
    memory_gib: Annotated[int, Field(ge=1, le=256)] = 2
    """Its memory, in GiB; what Ray's head keeps is far below."""


class RedisConfig(_Section):
    """Where Ray's head keeps its state, so that its death costs no engine. One of the two."""

    address: Annotated[
        str | None,
        Field(
            pattern=r"^[a-zA-Z0-9.-]+:[0-9]+$",
            json_schema_extra={"allowed": "host and port, such as `10.0.0.3:6379`"},
        ),
    ] = None
    """Host and port of one that there is, such as Memorystore's `10.0.0.3:6379`."""
    own: OwnRedisConfig | None = None
    """A Redis of its own, of one pod with a disk."""


class SecretsConfig(_Section):
    """Names of Secrets that you make. No secret stands in a manifest."""

    ray_token: ObjectName = "slicewise-ray-token"  # a name
    """Ray's own token, under the key `auth_token`."""
    redis: ObjectName = "slicewise-redis"
    """Redis' password, under the key `password`."""
    api_keys: ObjectName | None = None
    """API keys, under the key `api-keys`; with `auth.keys_env` or `auth.keys_file`. The key
    `metrics-key` in it is what Prometheus shows to read the gateways' metrics."""
    link: ObjectName | None = None
    """The links' secret, under the key `link-secret`; with `link.secret_env` or
    `link.secret_file`."""
    hugging_face: ObjectName | None = None
    """A token of Hugging Face, under the key `token`."""


class GkeClassConfig(_Section):
    """What GKE has to know of a compute class beside its market."""

    compute_class: ComputeClassName
    """Its name in the deployments; once."""
    min_slices: Annotated[int, Field(ge=0, le=1000)] = 0
    """Fewest slices of each shape, kept whether they are asked for or not."""
    max_slices: Annotated[int | None, Field(ge=1, le=1000)] = None
    """Most slices of each shape; by default twice the replicas that may want one, because a slice
    that is taken away is replaced while it still drains."""
    reservation: ObjectName | None = None
    """Name of the reservation; of a class of the market `reserved`."""
    reservation_project: str | None = None
    """The project that owns it, when left out the cluster's."""
    zones: Annotated[tuple[Zone, ...], Items] = ()
    """Zones its slices may be in, when left out `cluster.zones`."""


class PodConfig(_Section):
    """The size of a pod without chips."""

    cpus: Annotated[int, Field(ge=1, le=256)] = 4
    """CPUs."""
    memory_gib: Annotated[int, Field(ge=1, le=1024)] = 16
    """Memory, in GiB."""


class ControlPoolConfig(PodConfig):
    """The pods of control processes: one process for each engine, directory and dashboard."""

    cpus: Annotated[int, Field(ge=1, le=256)] = 1
    """CPUs of each pod. It takes 20 control processes per CPU."""
    memory_gib: Annotated[int, Field(ge=1, le=1024)] = 4
    """Memory of each pod, in GiB; enough for as many processes as its CPUs take."""
    pods: Annotated[int | None, Field(ge=2, le=1000)] = None
    """How many there are; by default and at least as many as the most engines need, and one more,
    because one at a time is away while nodes are upgraded."""


class UpgradeConfig(_Section):
    """How a change of the Ray cluster is rolled out."""

    kind: Annotated[UpgradeKind, Field(strict=False)] = UpgradeKind.IN_PLACE
    """`in_place`, `new_cluster` or `incremental`."""
    step_percent: Annotated[int, Field(ge=1, le=100)] = 25
    """Of `incremental`: how much traffic moves at a time."""
    interval_s: Annotated[int, Field(ge=1, le=86_400)] = 60
    """Of `incremental`: seconds between two steps."""
    max_surge_percent: Annotated[int, Field(ge=1, le=100)] = 25
    """Of `incremental`: how much capacity there may be beyond the wanted; at least a step."""


class ClusterConfig(_Section):
    """Everything under `cluster`."""

    name: ShortName
    """Name of the RayService, and the beginning of most others."""
    namespace: ShortName = "serving"
    """Namespace of everything that has one."""
    zones: Annotated[tuple[Zone, ...], Items, Field(min_length=1)]
    """Zones that slices may be in."""
    provisioning: Annotated[Provisioning, Field(strict=False)] = Provisioning.AUTO
    """Who makes node pools: `auto` (GKE) or `node-pools` (you, with the rendered script)."""
    images: ImagesConfig
    """Container images."""
    redis: RedisConfig
    """Where Ray's head keeps its state."""
    secrets: SecretsConfig = SecretsConfig()
    """Names of Secrets that you make."""
    classes: Annotated[tuple[GkeClassConfig, ...], Items] = ()
    """Bounds, reservations and zones by compute class."""
    spot_shutdown_s: Literal[30, 120] = 30
    """How long spot nodes are known to last after the announcement of their end, in seconds: 30, or
    120 where GKE gives it, from 1.35.0-gke.1171000 on. Classes that GKE makes pools of ask for 120;
    whether TPU hosts get it is unproven."""
    host: HostConfig = HostConfig()
    """What a pod on a TPU host asks for, and what its host is like."""
    head_away_s: Annotated[int, Field(ge=60, le=604_800)] = 86_400
    """How long gateways and hosts of slices go on while the head is away; then Ray ends them. A
    day, because what the head does, scaling, can wait, and engines take minutes to load."""
    head: PodConfig = PodConfig()
    """The head's pod."""
    gateway_pod: PodConfig = PodConfig()
    """Each gateway's pod; there are as many as `gateway.replicas` says or makes. It has room for
    two gateways by `gateway.num_cpus`, because the next one starts before the old one ends."""
    control_pool: ControlPoolConfig = ControlPoolConfig()
    """The pods of control processes, apart from the gateways'."""
    upgrade: UpgradeConfig = UpgradeConfig()
    """What a change of the Ray cluster does, and in which steps."""
    gateway_class: ObjectName = "gke-l7-rilb"
    """GatewayClass of the way in; by default an internal load balancer."""
    hostname: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")] | None = None
    """Host name that is routed here; any, when left out."""
    google_service_account: str | None = None
    """Google service account of all pods; when left out, grant rights to the Kubernetes service
    accounts themselves."""
    bucket: ObjectName | None = None
    """Cloud Storage bucket of weights, mounted read-only at `/data` on TPU hosts, and on gateways,
    which read configuration and tokenizer."""
    first_run_out: (
        Annotated[
            str,
            Field(
                pattern=r"^(gs|s3)://[a-zA-Z0-9._/-]+$",
                json_schema_extra={"allowed": "an address such as `gs://BUCKET/first-run`"},
            ),
        ]
        | None
    ) = None
    """Where a [first run](first-run.md) keeps what it finds, which has to outlive its pod; with it
    a Job or RayJob is rendered that makes one."""
    dranet: bool = False
    """Give every TPU host all its network interfaces (managed DRANET), for traffic between
    slices."""
    monitoring_namespace: ShortName = "monitoring"
    """Where Prometheus runs."""
    operator_namespace: ShortName = "kuberay-operator"
    """Where the KubeRay operator runs."""

    def class_config(self, compute_class: str) -> GkeClassConfig:
        """Returns the settings of a compute class; the defaults where none are given."""
        for entry in self.classes:
            if entry.compute_class == compute_class:
                return entry
        return GkeClassConfig(compute_class=compute_class)
