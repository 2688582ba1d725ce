"""The application's part of `serve_config.yaml`: strict, frozen, parsed once.

Owns the fields under `args`, their types, ranges and defaults; those of models are in
`serving.config.models`, those of slices in `serving.config.slices`. Rules between fields, and the
arguments of vLLM, are in `rules`, `slice_rules` and `vllm_rules`. Only `parse_app_config` applies
all of them, so an `AppConfig` comes from there. Reads no file and no environment variable.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from serving.config import rules, slice_rules
from serving.config.models import ModelConfig, PaceConfig
from serving.config.schema import problems_of
from serving.config.sections import STRICT_SECTION, Items, NonEmpty, OptionalEnvName
from serving.config.slices import ComputeClassConfig, built_in_classes
from serving.config.telemetry import LoggingConfig, TracingConfig
from serving.config.vllm import vllm_rules
from serving.config.vllm.vllm_args import VllmArgs, installed_vllm_args
from serving.domain import limits
from serving.domain.capacity.gateway_sizing import MAX_GATEWAYS, GatewayCount, needed_gateways
from serving.domain.errors import ConfigError, Problem
from serving.domain.limits import GIB, KIB, MIB, LinkEncryption
from serving.telemetry.metric_names import MAX_TENANTS


class _Section(BaseModel):
    model_config = STRICT_SECTION


_METRICS_PORTS = 4


class OpenField(StrEnum):
    """The fields of a request that steer engines, and that clients may set only where allowed."""

    VLLM_XARGS = "vllm_xargs"
    KV_TRANSFER_PARAMS = "kv_transfer_params"
    EC_TRANSFER_PARAMS = "ec_transfer_params"
    PRIORITY = "priority"  # and the header X-Vllm-Priority
    DATA_PARALLEL_RANK = "data_parallel_rank"  # the header X-data-parallel-rank
    MM_PROCESSOR_KWARGS = "mm_processor_kwargs"
    MEDIA_IO_KWARGS = "media_io_kwargs"


class GatewayConfig(_Section):
    """The gateway: what it takes, and how long a request may wait in it."""

    replicas: Annotated[int, Field(ge=1, le=MAX_GATEWAYS)] | Literal["auto"] = 1
    """Gateways behind the Serve proxy. `auto`: as many as the most engines can keep busy."""
    expected_tokens_per_s: Annotated[float, Field(ge=0, le=1e12)] | None = None
    """Of `auto`: the output tokens that all gateways together send at their busiest. `null`: what
    the most engines of every deployment emit when they are full, at an assumed pace."""
    expected_requests_per_s: Annotated[float, Field(ge=0, le=1e12)] | None = None
    """Of `auto`: the requests that they take then. `null`: as many as the tokens are answers of an
    assumed length."""
    num_cpus: Annotated[float, Field(ge=0, le=1024)] = 0.1
    """CPUs that Ray reserves for each gateway; 1 where it is to have the core that it takes when it
    is busy."""
    max_body_bytes: Annotated[int, Field(ge=KIB, le=GIB)] = 16 * MIB
    """Longest request body; a longer one is refused with 413."""
    body_budget_bytes: Annotated[int, Field(ge=KIB, le=1024 * GIB)] = limits.BODY_BUDGET_BYTES
    """Bytes of the bodies of all requests in flight, per gateway; what is more is refused with 503
    and a time to retry, and not read. At least `max_body_bytes`."""
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = limits.BODY_TIMEOUT_S
    """How long a client may take to send a request's body; then 408. An upload of a file may take a
    second more for each 64 KiB that have come."""
    max_unread_bytes: Annotated[int, Field(ge=128 * KIB, le=GIB)] = limits.MAX_UNREAD_BYTES
    """Bytes of one answer that may wait in a gateway for a client that does not read; with more its
    connection is ended, and its engine goes on with others."""
    unread_budget_bytes: Annotated[int, Field(ge=128 * KIB, le=1024 * GIB)] = (
        limits.UNREAD_BUDGET_BYTES
    )
    """The same for all answers of one gateway; beyond it the client that has left most unread is
    ended. At least `max_unread_bytes`."""
    request_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = limits.REQUEST_DEADLINE_S
    """How long a request waits for its first token, if it does not say (`X-SLO-TTFT-Ms`): in front
    of a model without a ready engine before 503 (after 5 s, where the next one is known to come
    later), and for room in one before 429. What cannot have
    it in time is refused when it comes. Each token of its prompt adds the model's
    `objectives.ttft_per_prompt_token_s`. A stream that has begun and lost its engine waits so long
    for another."""
    flex_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = limits.FLEX_DEADLINE_S
    """The same for requests with the `service_tier` `flex`."""
    max_engine_losses: Annotated[int, Field(ge=1, le=100)] = 3
    """Engines that may be lost while they hold one request; then it is given up with 500."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=1_000_000)] = limits.MAX_WAITING_REQUESTS
    """Requests that wait while no engine is ready, per gateway and model; one more is refused with
    429. Where one is ready, those are refused that would wait for longer than
    `request_deadline_s`, however many wait."""
    max_behind_s: Annotated[float, Field(gt=0, le=600)] = 2.0
    """How late a gateway may be with the tokens it has; beyond it new requests are refused with
    429."""
    max_hold_s: Annotated[float, Field(ge=0, le=1)] = limits.MAX_HOLD_S
    """How long tokens of a stream may wait in a busy gateway, so that several go to the client at
    once. How long they do follows the load: not at all below half of a core, this long near a whole
    one. The first token and the end of an answer never wait. 0: nothing waits, however busy."""
    min_hold_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How long tokens of a stream wait in any case, also in an idle gateway; at most `max_hold_s`.
    Costs clients the grain of their streams, and saves CPU of the proxy."""
    max_ongoing_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Requests that Serve hands to one gateway at once, waiting ones included."""
    max_sequences: Annotated[int, Field(ge=1, le=16_384)] = limits.MAX_SEQUENCES
    """Answers that one request may ask for, `n` times its prompts; more is refused with 400."""
    max_inputs: Annotated[int, Field(ge=1, le=1_000_000)] = limits.MAX_INPUTS
    """Inputs of one request to a pooling model; more is refused with 400."""
    open_fields: Annotated[tuple[Annotated[OpenField, Field(strict=False)], ...], Items] = ()
    """Fields that steer engines and that clients may set all the same; any other one is refused
    with 400 unless it is neutral."""
    separate_tenants: bool = False
    """Give each tenant prefix caches of its own, so that no tenant can tell by the speed of an
    answer what another one asked. A prefix that tenants have in common is then computed for each
    of them. Needs API keys, which name the tenants."""
    cors_origins: Annotated[
        tuple[
            Annotated[
                str,
                Field(
                    pattern=r"^(\*|[a-z][a-z0-9+.-]*://[a-z0-9._\-\[\]:]+)$",
                    json_schema_extra={
                        "allowed": "`*`, or an origin as browsers send it such as "
                        "`https://chat.example.com`"
                    },
                ),
            ],
            ...,
        ],
        Items,
    ] = ()
    """Origins whose web pages may ask from a browser; `*` means all. None: no page may."""
    vllm_request_metrics: bool = False
    """Show vLLM's own metrics of single requests too. They say of one gateway what ours say by
    class and slice, and cost more than a tenth of what it can carry."""
    metrics_port: Annotated[int, Field(ge=1, le=65_532)] | None = None
    """First of four ports of which each gateway takes one, the first that is free on its host or in
    its pod, and answers `/metrics` there for itself alone; without it gateways are read through the
    proxy, where any of them answers."""
    tpu_exporter_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port of the TPU exporters on the slices' hosts, for the chips on the fleet page; without it
    they are not shown there."""

    @property
    def metrics_ports(self) -> tuple[int, ...]:
        """The ports that gateways may take for their own `/metrics`; none without the setting.

        A pod has one gateway, two while they are replaced, and those of another pod that is lost.
        """
        if self.metrics_port is None:
            return ()
        return tuple(range(self.metrics_port, self.metrics_port + _METRICS_PORTS))


class AuthConfig(_Section):
    """Who may ask. With neither source of keys, everybody who reaches the proxy may."""

    keys_file: NonEmpty | None = None
    """File with the accepted API keys, one per line; a tenant's name and a space may stand in front
    of a key. Or YAML with a record for each key, which says what the key may do."""
    keys_env: OptionalEnvName = None
    """Environment variable of the gateways with the accepted API keys, separated by commas; names
    likewise."""
    max_tenants: Annotated[int, Field(ge=1, le=MAX_TENANTS)] = 20
    """Tenants that the keys may name. Metrics have series for each, which is what this bounds."""
    allow_anonymous_beyond_loopback: bool = False
    """Serve without keys on an address that other machines reach."""

    @property
    def has_keys(self) -> bool:
        """True if requests need a key."""
        return self.keys_file is not None or self.keys_env is not None


class ListenOn(StrEnum):
    """The addresses that an engine host's link can listen on."""

    NODE = "node"  # the address of its Ray node, which gateways on other nodes reach
    LOOPBACK = "loopback"  # this machine only


class LinkConfig(_Section):
    """The token link between a gateway and an engine host."""

    secret_file: NonEmpty | None = None
    """File with the secret both ends prove to each other. Neither source: a fresh one per start."""
    secret_env: OptionalEnvName = None
    """Environment variable with that secret."""
    listen_on: Annotated[ListenOn, Field(strict=False)] = ListenOn.NODE
    """`node`, or `loopback` where everything runs on one machine."""
    encryption: Annotated[LinkEncryption, Field(strict=False)] = LinkEncryption.AUTO
    """`auto`: TLS with the secret as its root, unless the engine host listens on loopback; `tls`:
    there too; `none`: never, because a mesh or the like encrypts what hosts send each other. It
    holds for the streams from the agents of slices' hosts as well."""
    heartbeat_interval_s: Annotated[float, Field(gt=0, le=60)] = limits.HEARTBEAT_INTERVAL_S
    """Time between two heartbeats of either end."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=600)] = limits.HEARTBEAT_TIMEOUT_S
    """Silence after which an engine host counts as lost; more than two intervals."""
    gateway_timeout_s: Annotated[float, Field(gt=0, le=600)] = limits.GATEWAY_TIMEOUT_S
    """Silence after which an engine host gives a gateway up and frees its requests; more than two
    intervals. One that has ended is known at once."""
    max_buffered_bytes: Annotated[int, Field(ge=64 * KIB, le=GIB)] = limits.MAX_BUFFERED_BYTES
    """Unsent bytes per link. A gateway that leaves more unread is cut off; to an engine host the
    rest waits."""


class BatchesConfig(_Section):
    """Batches by OpenAI's API. Off until there is a folder or a bucket to keep them in."""

    folder: NonEmpty | None = None
    """Folder for files, batches and answers, which every gateway opens: all of them run on one
    node, and its disk keeps what it has. With neither this nor `store`, `/v1/files` and
    `/v1/batches` refuse."""
    store: NonEmpty | None = None
    """The same in a bucket, `gs://BUCKET/...` or `s3://BUCKET/...`, for gateways on any number of
    nodes. It has to be theirs alone, and they find credentials as the clouds' own tools do."""
    max_file_bytes: Annotated[int, Field(ge=KIB, le=GIB)] = 200 * MIB
    """Longest file; a longer one is refused with 413."""
    max_lines: Annotated[int, Field(ge=1, le=1_000_000)] = 50_000
    """Lines of one batch; one with more fails. A line is as long as `gateway.max_body_bytes` at
    most."""
    max_tenant_bytes: Annotated[int, Field(ge=KIB, le=1024 * GIB)] = 10 * GIB
    """Bytes of the files of one tenant together; an upload beyond is refused with 413. Files of
    answers count, and are never refused; once they are beyond, new batches are, with 413."""
    max_tenant_batches: Annotated[int, Field(ge=1, le=10_000)] = 200
    """Batches of one tenant that have not ended; one more is refused with 429. All gateways look
    through those of all tenants each second."""
    file_lifetime_s: Annotated[float, Field(ge=60, le=366 * 86_400)] = 30 * 86_400.0
    """How long files stay, if their client does not say; then they are deleted."""
    batch_lifetime_s: Annotated[float, Field(ge=60, le=10 * 366 * 86_400)] = 90 * 86_400.0
    """How long a batch that has ended stays in lists and can be asked for, with its counts and its
    cost; longer if files of its answers do. A change holds for batches that end after it."""
    completion_windows: Annotated[
        tuple[
            Annotated[
                str,
                Field(
                    pattern=r"^[1-9][0-9]{0,3}[mh]$",
                    json_schema_extra={"allowed": "minutes or hours such as `30m` or `24h`"},
                ),
            ],
            ...,
        ],
        Items,
        Field(min_length=1),
    ] = ("24h",)
    """How long a batch may take; a client names one of these. What is not answered by then is
    not."""
    batches_at_once: Annotated[int, Field(ge=1, le=64)] = 4
    """Batches that one gateway works on. Beyond those it begins one of each tenant of whom no
    gateway works on any: as many again at most, one at least, and else as far as half of
    `gateway.max_waiting_requests` has room for `lines_in_flight` of each. Two more it reads, or
    ends."""
    lines_in_flight: Annotated[int, Field(ge=1, le=1024)] = limits.BATCH_LINES_IN_FLIGHT
    """Lines of one batch that are asked at once, at first. Then, for a model with `objectives`, as
    many as make the steps of its engines take 0.7 of `objectives.tpot_s`; for another one more,
    where the batch would not be done in time and lines do not have to wait. Fewer, where others'
    requests miss their objectives. All batches of a gateway have at most as many as half of
    `gateway.max_waiting_requests`."""
    lease_s: Annotated[float, Field(ge=1, le=600)] = 30.0
    """How long a gateway that falls silent keeps its batches; then others go on with them. With
    `store` at least 20 s: a bucket bears few writes."""

    @property
    def windows_s(self) -> dict[str, float]:
        """The length of each completion window."""
        seconds = {"m": 60.0, "h": 3600.0}
        return {each: int(each[:-1]) * seconds[each[-1]] for each in self.completion_windows}


class HealthConfig(_Section):
    """How soon an engine that stopped turning is found out."""

    check_period_s: Annotated[float, Field(gt=0, le=600)] = limits.CHECK_PERIOD_S
    """Time between two checks of an engine."""
    hang_timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    """Time without an answer after which an engine counts as hung; more than one period, and than
    its longest step. `null`: by the kind of engine, 120 s on TPUs, 20 s on CPUs, 4 s if paced."""
    start_timeout_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Time that an engine may take to load its weights and compile its programs; then it is ended,
    and another try made. `null`: by the kind of engine, two hours on TPUs, else half an hour."""
    probe_timeout_s: Annotated[float, Field(ge=0, le=3600)] = limits.PROBE_TIMEOUT_S
    """How long the probe of a slice may take before an engine starts on it; 0: no probe."""
    engine_lease_s: Annotated[float, Field(ge=60, le=86400)] = limits.ENGINE_LEASE_S
    """How long an engine goes on serving after its control process is gone, if no other one takes
    it over; then it drains and gives its slice back."""
    engine_handover_s: Annotated[float, Field(ge=0, le=86400)] = limits.ENGINE_HANDOVER_S
    """The same after a shutdown of Serve, which may be the first half of deploying again."""
    engine_silence_s: Annotated[float, Field(ge=15, le=3600)] = limits.ENGINE_SILENCE_S
    """How long an engine host that exists may not answer its control process; then it is killed and
    replaced. Its requests have moved long before (`link.heartbeat_timeout_s`)."""


class RolloutConfig(_Section):
    """How engines and gateways are replaced when the configuration changes."""

    drain_s: Annotated[float, Field(ge=0, le=3600)] = 300.0
    """How long a replaced or surplus engine waits for streams that no other engine of its version
    can go on with; then they fail. Streams that have another engine leave at once."""
    gateway_drain_s: Annotated[float, Field(ge=10, le=3600)] = 600.0
    """How long a replaced gateway waits for the answers that it is sending; then they are cut."""
    step_ratio: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The share of a deployment's engines that is replaced at once; one at least."""


# What Ray reserves for each control process, so that a small node takes no more of them than its
# memory has room for. They use less: they wait for messages.
CONTROL_CPUS = 0.05
# Directory and dashboard.
_NUM_OTHER_CONTROL_PROCESSES = 2


def processes_per_node(cpus: float) -> int:
    """Returns how many control processes Ray puts on a node with so many CPUs."""
    return round(cpus / CONTROL_CPUS)


class ControlPlacement(StrEnum):
    """The hosts of the parts that are not an engine: gateways, directory, slice replicas."""

    OFF_TPU_HOSTS = "off_tpu_hosts"  # a lost slice takes none of them with it
    ANYWHERE = "anywhere"  # for a cluster that is one TPU VM


class AppConfig(_Section):
    """Everything under `args`. Its mappings are never changed after parsing."""

    models: Annotated[tuple[ModelConfig, ...], Items, Field(min_length=1)]
    """The models served."""
    compute_classes: Annotated[tuple[ComputeClassConfig, ...], Items] = ()
    """Where slices come from, beside the built-in classes; one named as those replaces it."""
    gateway: GatewayConfig = GatewayConfig()
    """What the gateway takes, and how long a request may wait."""
    auth: AuthConfig = AuthConfig()
    """Who may ask."""
    batches: BatchesConfig = BatchesConfig()
    """Files of requests that are answered when there is room."""
    link: LinkConfig = LinkConfig()
    """The token link between gateways and engine hosts."""
    health: HealthConfig = HealthConfig()
    """How soon a hung engine is found out."""
    rollout: RolloutConfig = RolloutConfig()
    """How a change of this configuration replaces what runs."""
    tracing: TracingConfig = TracingConfig()
    """Traces of requests, by OpenTelemetry."""
    logging: LoggingConfig = LoggingConfig()
    """Log lines."""
    control_placement: Annotated[ControlPlacement, Field(strict=False)] = (
        ControlPlacement.OFF_TPU_HOSTS
    )
    """Where gateways, directory and slice replicas run: `off_tpu_hosts`, so that a lost slice takes
    none of them with it, or `anywhere` on a cluster that is one TPU VM."""

    @property
    def num_cpus(self) -> float:
        """The CPUs that Ray reserves for gateways, engine hosts and control processes, at most."""
        engine_hosts = sum(
            deployment.most_replicas * deployment.num_hosts * deployment.cpus_per_host
            for model in self.models
            for deployment in model.deployments
        )
        control = self.num_control_processes * CONTROL_CPUS
        return engine_hosts + self.gateway_count.number * self.gateway.num_cpus + control

    @property
    def gateway_count(self) -> GatewayCount:
        """How many gateways there are, and why; everybody asks here, and not `gateway.replicas`."""
        asked = self.gateway
        if asked.replicas != "auto":
            return GatewayCount(asked.replicas, "as gateway.replicas says")
        outputs = [model.most_output for model in self.models]
        return needed_gateways(outputs, asked.expected_tokens_per_s, asked.expected_requests_per_s)

    @property
    def num_control_processes(self) -> int:
        """The control processes, at most: one for each replica, the directory, the dashboard."""
        replicas = sum(each.most_replicas for model in self.models for each in model.deployments)
        return replicas + _NUM_OTHER_CONTROL_PROCESSES

    @property
    def num_chips(self) -> int:
        """The number of TPU chips of all slices that the application requests, at most."""
        return sum(
            deployment.most_replicas * deployment.slice.num_chips
            for model in self.models
            for deployment in model.deployments
            if deployment.slice is not None
        )

    @property
    def is_autoscaled(self) -> bool:
        """True if a policy sets the number of any engines."""
        return any(
            deployment.is_autoscaled for model in self.models for deployment in model.deployments
        )

    def compute_class(self, name: str) -> ComputeClassConfig:
        """Returns the compute class of this name, declared or built in.

        Raises:
            KeyError: it is neither. Only a deployment without a slice may name such a class.
        """
        declared = {entry.name: entry for entry in self.compute_classes}
        return (built_in_classes() | declared)[name]


def parse_app_config(raw: object) -> AppConfig:
    """Returns the configuration in `raw`, the application's `args`, checked against vLLM.

    Where no vLLM is installed the names of its arguments are not checked.

    Raises:
        ConfigError: lists every problem found. Correct them all.
        UnsupportedVllmError: the installed vLLM is not one Slicewise knows.
    """
    return check_app_config(raw, installed_vllm_args())


def check_app_config(raw: object, vllm_args: VllmArgs | None) -> AppConfig:
    """Parses as `parse_app_config` does, against the given vLLM. Pure.

    Without `vllm_args`, the names of vLLM's arguments are not checked.

    Raises:
        ConfigError: lists every problem found.
    """
    problems: list[Problem] = []
    config: AppConfig | None = None
    try:
        config = AppConfig.model_validate(raw)
    except ValidationError as error:
        problems = problems_of(error, AppConfig.model_json_schema())
    if isinstance(raw, Mapping):
        problems.extend(_broken_rules(raw, vllm_args))
    if config is not None:
        problems.extend(_too_many_gateways(config))
    if config is None or problems:
        raise ConfigError(problems)
    return config


def exposure_problem(auth: AuthConfig, http_host: str) -> Problem | None:
    """Returns the fault of serving under `auth` on `http_host`, or `None`.

    `http_host` is Serve's `http_options.host`.
    """
    if auth.has_keys or auth.allow_anonymous_beyond_loopback or rules.is_loopback(http_host):
        return None
    return Problem(
        "auth",
        f"no API keys, but http_options.host {http_host!r} is reached from other machines",
        "allowed: keys_file or keys_env, a loopback host such as 127.0.0.1, or "
        "allow_anonymous_beyond_loopback: true",
    )


def _too_many_gateways(config: AppConfig) -> Iterator[Problem]:
    count = config.gateway_count
    if count.number > MAX_GATEWAYS:
        complaint = f"{count.number:,} gateways are more than there may be: {count.reason}"
        allowed = f"allowed: an integer up to {MAX_GATEWAYS}, or the rates that you expect"
        yield Problem("gateway.replicas", complaint, allowed, '"auto"')


def _broken_rules(raw: Mapping[str, object], vllm_args: VllmArgs | None) -> Iterator[Problem]:
    """Yields the rules between fields that `raw` breaks, whatever else is wrong with it."""
    models = rules.mappings_in(raw.get("models"))
    for index, model in models:
        yield from rules.model_problems(f"models[{index}]", model)
        yield from vllm_rules.vllm_problems(f"models[{index}]", model, vllm_args)
        pace = _with_defaults(model, "paced", PaceConfig())
        yield from rules.pace_problems(f"models[{index}].paced", pace)
        yield from slice_rules.model_slice_problems(f"models[{index}]", model)
        yield from slice_rules.tpu_engine_problems(f"models[{index}]", model)
        yield from rules.scaling_problems(f"models[{index}]", model)
    yield from rules.duplicate_name_problems(models)
    yield from rules.canary_problems(models)
    yield from slice_rules.compute_class_problems(raw, models)
    yield from rules.gateway_problems(_with_defaults(raw, "gateway", GatewayConfig()))
    batches = _with_defaults(raw, "batches", BatchesConfig())
    gateway = _with_defaults(raw, "gateway", GatewayConfig())
    yield from rules.batch_problems(batches, gateway)
    auth = _with_defaults(raw, "auth", AuthConfig())
    yield from rules.auth_problems(auth)
    yield from rules.tenant_problems(rules.mapping_in(raw, "gateway"), auth)
    yield from rules.link_problems(_with_defaults(raw, "link", LinkConfig()))
    yield from rules.health_problems(_with_defaults(raw, "health", HealthConfig()))
    yield from rules.tracing_problems(rules.mapping_in(raw, "tracing"))


def _with_defaults(
    raw: Mapping[str, object], name: str, defaults: BaseModel
) -> Mapping[str, object]:
    section = raw.get(name)
    return defaults.model_dump() | (section if isinstance(section, dict) else {})
