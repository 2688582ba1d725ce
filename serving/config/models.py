"""The models in `serve_config.yaml`: what is served, on which engines, in which deployments.

Owns their fields. Rules between fields are in `serving.config.rules` and `slice_rules` beside it,
those of vLLM's arguments in `vllm_rules`. Pure.
"""

import math
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue, model_validator

from serving.config.sections import ENV_NAME_WORDS, STRICT_SECTION, EnvName, Items, NonEmpty
from serving.config.slices import ComputeClassName, SliceConfig
from serving.domain.capacity.gateway_sizing import ASSUMED_SEQUENCE_TOKENS_PER_S, EngineOutput
from serving.domain.capacity.objectives import Objectives, ObjectivesConfig
from serving.domain.capacity.slice_profile import full_batch_tokens_per_s
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.model_version import model_version
from serving.domain.names.deployment_names import engine_deployment_name

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
# What vLLM takes where nothing is said. Source: vLLM 0.32.0 `engine/arg_utils.py`, read 2026-11-25.
_VLLM_MAX_NUM_SEQS = {EngineKind.VLLM: 128, EngineKind.VLLM_TPU: 256}


class _Section(BaseModel):
    model_config = STRICT_SECTION


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
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=16_777_216)] = 0
    """Tokens of one prompt in a step while there are other requests, as vLLM's argument; 0: all."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether it is at least one request's share of the step, as vLLM's argument."""
    kv_cache_tokens: Annotated[int, Field(ge=2, le=1_000_000_000)] | None = None
    """Tokens that its KV cache has room for, where prompts take time; those that it still has from
    other requests take none. `null`: room for all, and none are found."""
    block_size: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Tokens of one block of the KV cache: prompts are found in whole blocks."""
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
    """The slice of each replica; none is reserved, when left out."""
    replicas: Annotated[
        int, Field(ge=0, le=4096, json_schema_extra={"default": "1 or min_replicas"})
    ] = 1
    """Replicas, each with one engine or with as many as share its slice (`num_engines`), at least
    1. A deployment that scales starts with `min_replicas`, and this is left out."""
    min_replicas: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Fewest replicas. With `max_replicas` the deployment scales: the application's
    `autoscaling_policy` sets their number."""
    max_replicas: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most replicas of a deployment that scales; with `min_replicas`."""
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
        """True if a policy sets the number of its replicas."""
        return self.max_replicas is not None

    @property
    def most_replicas(self) -> int:
        """The most replicas it may have."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def num_hosts(self) -> int:
        """The number of hosts of each replica: those of its slices, 1 without any."""
        return 1 if self.slice is None else self.slice.num_hosts

    @property
    def num_engines(self) -> int:
        """The number of engines of each replica."""
        return 1 if self.slice is None else self.slice.num_engines

    @property
    def cpus_per_host(self) -> float:
        """The CPUs that Ray reserves on each host, for all engines there."""
        return self.num_cpus * (1 if self.slice is None else self.slice.engines_per_host)


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
    """vLLM engine arguments by their Python names. Checked against the installed vLLM. Of `paced`
    engines only `reasoning_parser` and its plug-in, which are their frontend's."""
    paced: PaceConfig | None = None
    """Pace of the `paced` engine; its defaults when left out. Refused with any other engine."""
    engine_env: Annotated[
        dict[EnvName, str],
        Field(json_schema_extra={"allowed": f"strings; names of {ENV_NAME_WORDS}"}),
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
    objectives: ObjectivesConfig | None = None
    """What a request is to see: gateways count by it what is late, and a request's deadline grows
    with its prompt as its objective does. `ttft_s` itself is no deadline: it is what most requests
    are to see. `null`: 2.5 s to the first token and 0.1 s for each after it. With a scaling policy
    give those of its `policy_kwargs` here too: gateways read only these. Without them engines hold
    no objective, and the policy is not told who met them."""
    holds_objectives: bool = True
    """Whether, while engines lack, as many requests as can be are served within `objectives`: an
    engine takes no more sequences than keep `tpot_s`, and what can be in time no more waits behind
    what can, with a fourth of the work. More are refused then. `false`: engines take what they have
    room for, in the order of arrival, and all are late alike."""
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
        """The version of its tokens; see `serving.domain.models.model_version`."""
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
    def own_objectives(self) -> Objectives | None:
        """What a request is to see; `None` if nothing is said of it."""
        return None if self.objectives is None else self.objectives.objectives

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
            "long_prefill_token_threshold": pace.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": pace.long_prefill_token_threshold_adaptive,
            "kv_cache_tokens": pace.kv_cache_tokens,
            "block_size": pace.block_size,
            "load_s": pace.load_ms / 1000,
            "compile_s": pace.compile_ms / 1000,
            "model_seed": pace.model_seed,
        }

    @property
    def most_output(self) -> EngineOutput:
        """What its engines emit at most, all of them there and full.

        By the pace of `paced` ones. Of others nobody has told the pace, so it is assumed.
        """
        num_engines = sum(each.most_replicas * each.num_engines for each in self.deployments)
        num_seqs = sum(
            each.most_replicas * each.num_engines * self._max_num_seqs(each)
            for each in self.deployments
        )
        rate, known_from = self._sequence_tokens_per_s()
        engines = "1 engine" if num_engines == 1 else f"{num_engines:,} engines"
        reason = (
            f"{num_seqs:,} sequences on {engines} of {self.name} at {rate:.3g} each, {known_from}"
        )
        return EngineOutput(num_engines, num_seqs * rate, reason)

    def _sequence_tokens_per_s(self) -> tuple[float, str]:
        """Returns the pace of a sequence on a full engine, and what it is known from."""
        if self.engine == EngineKind.PACED:
            pace = self.paced or PaceConfig()
            step_s, per_seq_s = pace.tpot_ms / 1000, pace.tpot_per_seq_ms / 1000
            rate = full_batch_tokens_per_s(step_s, per_seq_s, pace.max_num_seqs)
            if rate < math.inf:
                return rate / pace.max_num_seqs, "the pace given"
        return ASSUMED_SEQUENCE_TOKENS_PER_S, "assumed"

    def _max_num_seqs(self, deployment: DeploymentConfig) -> int:
        """Returns how many sequences one engine runs at once."""
        if self.engine == EngineKind.PACED:
            return (self.paced or PaceConfig()).max_num_seqs
        # On joined slices each holds the whole model, and as many sequences of its own.
        ranks = deployment.slice.num_slices if self.is_on_tpu and deployment.slice else 1
        ranks = self._count_of("data_parallel_size") or ranks
        return ranks * (self._count_of("max_num_seqs") or _VLLM_MAX_NUM_SEQS[self.engine])

    def _count_of(self, name: str) -> int | None:
        value = self.engine_args.get(name)
        return value if type(value) is int and value > 0 else None

    @property
    def is_on_tpu(self) -> bool:
        """True if its engines compute on the chips of their slices."""
        return self.engine == EngineKind.VLLM_TPU

    def deployment_name(self, deployment: DeploymentConfig) -> str:
        """Returns the name of the Serve deployment, which is unique in the application."""
        return engine_deployment_name(self.name, deployment.compute_class)
