"""The application's part of `serve_config.yaml`: strict, frozen, parsed once.

Owns the fields under `args`, their types, ranges and defaults; those of slices are in
`serving.config.slices`. Rules between fields, and the arguments of vLLM, are in
`serving.config.rules` and `serving.config.slice_rules`. Only `parse_app_config` applies all of
them, so an `AppConfig` comes from there. Reads no file and no environment variable.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from serving.config import rules, slice_rules
from serving.config.schema import problems_of
from serving.config.slices import (
    STRICT_SECTION,
    ComputeClassConfig,
    ComputeClassName,
    SliceConfig,
    built_in_classes,
)
from serving.config.telemetry import LoggingConfig, TracingConfig
from serving.config.vllm_args import VllmArgs, installed_vllm_args
from serving.domain import limits
from serving.domain.deployment_names import engine_deployment_name
from serving.domain.errors import ConfigError, Problem
from serving.domain.limits import GIB, KIB, MIB
from serving.domain.model_version import model_version
from serving.telemetry.metric_names import MAX_TENANTS

# A name travels in URLs, metric labels and the `model` field; it may be a Hugging Face id.
ModelName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$",
        json_schema_extra={"allowed": "letters, digits and `._:/@+-`, up to 200 characters"},
    ),
]
# A part of a metric label and of log lines.
VersionLabel = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$",
        json_schema_extra={"allowed": "letters, digits and `._-`, up to 40 characters"},
    ),
]
EnvName = Annotated[str, Field(pattern=rules.ENV_NAME)]
_ENV_NAME_WORDS = {"allowed": "letters, digits and `_`, not starting with a digit"}
OptionalEnvName = Annotated[EnvName | None, Field(json_schema_extra=_ENV_NAME_WORDS)]
NonEmpty = Annotated[str, Field(min_length=1, json_schema_extra={"allowed": "not empty"})]
# Lists become tuples, which is why these alone are not strict; their items are.
Items = Field(strict=False)


class _Section(BaseModel):
    model_config = STRICT_SECTION


class EngineKind(StrEnum):
    """The engines that turn token requests into tokens."""

    VLLM = "vllm"  # vLLM on the CPUs of its host, on a laptop or a simulated slice
    VLLM_TPU = "vllm-tpu"  # vLLM with tpu-inference on the chips of a slice
    PACED = "paced"  # a deterministic fake with a fixed pace, for tests and the load test itself


class PaceConfig(_Section):
    """The pace of the `paced` engine. Its timings are inputs, never measurements."""

    ttft_ms: Annotated[float, Field(ge=0, le=600_000)] = 20.0
    """Time from the start of a request's prefill to its first token, in milliseconds."""
    tpot_ms: Annotated[float, Field(ge=0, le=60_000)] = 5.0
    """Time of every later token of a request, in milliseconds."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Requests that run at once; the rest wait."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] = 2048
    """Prompt and output tokens of one request together."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0, le=1_000_000_000)] | None = None
    """Prompt tokens computed per second, in steps with the tokens of others; `null`: in no time."""
    tpot_per_seq_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    """What each token of a step adds to the step's time, in milliseconds."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=16_777_216)] = 8192
    """Tokens of one step, prompts' and output; counts where prompts take time."""
    load_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 0.0
    """Time that an engine takes to get its weights, in milliseconds."""
    compile_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 0.0
    """Time that it then takes to compile, in milliseconds."""
    model_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Which model it plays: with another seed the same prompts have other answers."""


class CompileCacheConfig(_Section):
    """Compiled programs, shared by all slices whose engines are set up alike."""

    store: NonEmpty
    """Folder that all hosts reach, `gs://BUCKET/...` or `s3://BUCKET/...`. Whoever may write there
    can run code on the engines."""
    local_dir: Annotated[
        str, Field(pattern=r"^/.+", json_schema_extra={"allowed": "an absolute path"})
    ] = "/tmp/slicewise-programs"
    """Folder on the disk of each host, from which engines read programs and to which they write."""
    budget_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long a pull may keep an engine from starting, and a push may take; then the engine
    compiles what has not come."""


class AdapterConfig(_Section):
    """One LoRA adapter, served under a name of its own."""

    name: ModelName
    """The `model` field of requests; unique over all models and adapters."""
    path: NonEmpty
    """Adapter folder or Hugging Face id."""


class DeploymentConfig(_Section):
    """One Serve deployment: the engines of one model on one compute class."""

    compute_class: ComputeClassName
    """Where the slices come from, by the name of the GKE ComputeClass; once per model."""
    slice: SliceConfig | None = None
    """The slice of each engine; none is reserved, when left out."""
    replicas: Annotated[
        int, Field(ge=0, le=4096, json_schema_extra={"default": "1 or min_replicas"})
    ] = 1
    """Engines; of a deployment that scales, those it starts with. At least 1 of one that does
    not."""
    min_replicas: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Fewest engines. With `max_replicas` the deployment scales: the application's
    `autoscaling_policy` sets their number."""
    max_replicas: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most engines of a deployment that scales; with `min_replicas`."""
    num_cpus: Annotated[float, Field(ge=0, le=1024)] = 0.1
    """CPUs that Ray reserves for each engine host; the engine itself may use more."""

    @model_validator(mode="before")
    @classmethod
    def _start_with_the_fewest(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("min_replicas") is None:
            return given
        return {"replicas": given["min_replicas"]} | given

    @property
    def is_autoscaled(self) -> bool:
        """True if a policy sets the number of its engines."""
        return self.max_replicas is not None

    @property
    def most_replicas(self) -> int:
        """The most engines it may have."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def num_hosts(self) -> int:
        """The number of hosts of each engine: those of its slices, 1 without any."""
        return 1 if self.slice is None else self.slice.num_hosts


class ModelConfig(_Section):
    """One model: its weights, how its engines run, where they run."""

    name: ModelName
    """The `model` field of requests; unique over all models and adapters."""
    source: NonEmpty
    """Folder in Hugging Face layout, or Hugging Face id."""
    engine: Annotated[EngineKind, Field(strict=False)] = EngineKind.VLLM
    """`vllm` on CPUs, `vllm-tpu` on the chips of a slice, or `paced`: a deterministic fake for
    tests and benchmarks."""
    engine_args: dict[str, JsonValue] = {}
    """vLLM engine arguments by their Python names. Checked against the installed vLLM."""
    paced: PaceConfig | None = None
    """Pace of the `paced` engine; its defaults when left out. Refused with any other engine."""
    engine_env: Annotated[
        dict[EnvName, str],
        Field(json_schema_extra={"allowed": f"strings; names of {_ENV_NAME_WORDS['allowed']}"}),
    ] = {}
    """Environment variables of the engine's processes."""
    compile_cache: CompileCacheConfig | None = None
    """Where engines of `vllm-tpu` keep compiled programs; lost with the pod, when left out. Refused
    with any other engine."""
    frontend_args: dict[str, JsonValue] = {}
    """Options of vLLM's OpenAI frontend by their Python names. Checked likewise."""
    lora_adapters: Annotated[tuple[AdapterConfig, ...], Items] = ()
    """Adapters over this model; need `enable_lora: true` in `engine_args`."""
    deployments: Annotated[tuple[DeploymentConfig, ...], Items, Field(min_length=1)]
    """Where the engines run, one Serve deployment per compute class."""
    version: VersionLabel | None = None
    """A label of the version, to be changed where nothing else tells that the tokens change: other
    weights under the same `source`."""
    canary_of: ModelName | None = None
    """The model of which this one is a canary: it takes a share of that model's requests, and
    answers under its name. Asked for by its own name it answers too."""
    canary_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """The canary's share of the requests; only and always with `canary_of`. A request lies in it by
    its `user`, or by its id where it has none."""

    @property
    def version_id(self) -> str:
        """The version of its tokens; see `serving.domain.model_version`."""
        return model_version(
            source=self.source,
            engine=self._token_engine,
            engine_args=self.engine_args,
            engine_env=self.engine_env,
            adapters=[(adapter.name, adapter.path) for adapter in self.lora_adapters],
            label=self.version,
        )

    @property
    def _token_engine(self) -> str:
        """The engine, as far as its tokens depend on it: the pace of a `paced` one does not."""
        if self.engine != EngineKind.PACED:
            return str(self.engine)
        return f"{self.engine} {0 if self.paced is None else self.paced.model_seed}"

    @property
    def answers_as(self) -> tuple[str, ...]:
        """The base names that its frontend takes; answers carry the first."""
        return (self.name,) if self.canary_of is None else (self.canary_of, self.name)

    def paced_options(self) -> dict[str, float | int | None]:
        """Returns the options of a `paced` engine, in the engine's own terms; times are seconds."""
        pace = self.paced or PaceConfig()
        return {
            "ttft_s": pace.ttft_ms / 1000,
            "time_per_token_s": pace.tpot_ms / 1000,
            "max_num_seqs": pace.max_num_seqs,
            "max_model_len": pace.max_model_len,
            "prefill_tokens_per_s": pace.prefill_tokens_per_s,
            "tpot_per_seq_s": pace.tpot_per_seq_ms / 1000,
            "max_num_batched_tokens": pace.max_num_batched_tokens,
            "load_s": pace.load_ms / 1000,
            "compile_s": pace.compile_ms / 1000,
            "model_seed": pace.model_seed,
        }

    @property
    def is_on_tpu(self) -> bool:
        """True if its engines compute on the chips of their slices."""
        return self.engine == EngineKind.VLLM_TPU

    def deployment_name(self, deployment: DeploymentConfig) -> str:
        """Returns the name of the Serve deployment, which is unique in the application."""
        return engine_deployment_name(self.name, deployment.compute_class)


class GatewayConfig(_Section):
    """The gateway: what it takes, and how long a request may wait in it."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Gateways behind the Serve proxy."""
    num_cpus: Annotated[float, Field(ge=0, le=1024)] = 0.1
    """CPUs that Ray reserves for each gateway."""
    max_body_bytes: Annotated[int, Field(ge=KIB, le=GIB)] = 16 * MIB
    """Longest request body; a longer one is refused with 413."""
    request_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = limits.REQUEST_DEADLINE_S
    """How long a request waits for an engine before 503."""
    max_engine_losses: Annotated[int, Field(ge=1, le=100)] = 3
    """Engines that may be lost while they hold one request; then it is given up with 500."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=1_000_000)] = limits.MAX_WAITING_REQUESTS
    """Requests that wait for an engine, per gateway and model; one more is refused with 429."""
    max_behind_s: Annotated[float, Field(gt=0, le=600)] = 2.0
    """How late a gateway may be with the tokens it has; beyond it new requests are refused with
    429."""
    max_ongoing_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Requests that Serve hands to one gateway at once, waiting ones included."""
    vllm_request_metrics: bool = False
    """Show vLLM's own metrics of single requests too. They say of one gateway what ours say by
    class and slice, and cost more than a tenth of what it can carry."""
    tpu_exporter_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port of the TPU exporters on the slices' hosts, for the chips on the fleet page; without it
    they are not shown there."""


class AuthConfig(_Section):
    """Who may ask. With neither source of keys, everybody who reaches the proxy may."""

    keys_file: NonEmpty | None = None
    """File with the accepted API keys, one per line; a tenant's name and a space may stand in front
    of a key."""
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
    heartbeat_interval_s: Annotated[float, Field(gt=0, le=60)] = limits.HEARTBEAT_INTERVAL_S
    """Time between two heartbeats of either end."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0, le=600)] = limits.HEARTBEAT_TIMEOUT_S
    """Silence after which the other end counts as lost; more than two intervals."""
    max_buffered_bytes: Annotated[int, Field(ge=64 * KIB, le=GIB)] = limits.MAX_BUFFERED_BYTES
    """Unsent bytes per link. A gateway that leaves more unread is cut off; to an engine host the
    rest waits."""


class HealthConfig(_Section):
    """How soon an engine that stopped turning is found out."""

    check_period_s: Annotated[float, Field(gt=0, le=600)] = limits.CHECK_PERIOD_S
    """Time between two checks of an engine."""
    hang_timeout_s: Annotated[float, Field(gt=0, le=3600)] = limits.HANG_TIMEOUT_S
    """Time without an answer after which an engine counts as hung; more than one period."""
    probe_timeout_s: Annotated[float, Field(ge=0, le=3600)] = limits.PROBE_TIMEOUT_S
    """How long the probe of a slice may take before an engine starts on it; 0: no probe."""


class RolloutConfig(_Section):
    """How engines and gateways are replaced when the configuration changes."""

    drain_s: Annotated[float, Field(ge=0, le=3600)] = 300.0
    """How long a replaced or surplus engine waits for streams that no other engine of its version
    can go on with; then they fail. Streams that have another engine leave at once."""
    gateway_drain_s: Annotated[float, Field(ge=10, le=3600)] = 600.0
    """How long a replaced gateway waits for the answers that it is sending; then they are cut."""
    step_ratio: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The share of a deployment's engines that is replaced at once; one at least."""


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
        """The CPUs that Ray reserves for gateways and engine hosts, at the most engines."""
        engine_hosts = sum(
            deployment.most_replicas * deployment.num_hosts * deployment.num_cpus
            for model in self.models
            for deployment in model.deployments
        )
        return engine_hosts + self.gateway.replicas * self.gateway.num_cpus

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


def _broken_rules(raw: Mapping[str, object], vllm_args: VllmArgs | None) -> Iterator[Problem]:
    """Yields the rules between fields that `raw` breaks, whatever else is wrong with it."""
    models = rules.mappings_in(raw.get("models"))
    for index, model in models:
        yield from rules.model_problems(f"models[{index}]", model, vllm_args)
        pace = _with_defaults(model, "paced", PaceConfig())
        yield from rules.pace_problems(f"models[{index}].paced", pace)
        yield from slice_rules.model_slice_problems(f"models[{index}]", model)
        yield from slice_rules.tpu_engine_problems(f"models[{index}]", model)
        yield from rules.scaling_problems(f"models[{index}]", model)
    yield from rules.duplicate_name_problems(models)
    yield from rules.canary_problems(models)
    yield from slice_rules.compute_class_problems(raw, models)
    yield from rules.gateway_problems(_with_defaults(raw, "gateway", GatewayConfig()))
    yield from rules.auth_problems(_with_defaults(raw, "auth", AuthConfig()))
    yield from rules.link_problems(_with_defaults(raw, "link", LinkConfig()))
    yield from rules.health_problems(_with_defaults(raw, "health", HealthConfig()))
    yield from rules.tracing_problems(rules.mapping_in(raw, "tracing"))


def _with_defaults(
    raw: Mapping[str, object], name: str, defaults: BaseModel
) -> Mapping[str, object]:
    section = raw.get(name)
    return defaults.model_dump() | (section if isinstance(section, dict) else {})
