"""Defines all that an engine host needs to run one engine. Values only; travels through Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from serving.config.slice_spec import SliceSpec
from serving.domain import limits
from serving.domain.limits import LinkEncryption
from serving.telemetry.process_log import DEFAULT_STYLE, LogStyle
from serving.telemetry.spans import NO_TRACES, TraceSettings


@dataclass(frozen=True, slots=True)
class CompileCacheSpec:
    """The place of compiled programs. See `CompileCacheConfig`."""

    store: str
    local_dir: str
    budget_s: float


@dataclass(frozen=True, slots=True)
class TpuSpec:
    """The further settings of an engine on TPU. `compile_cache` is `None` if none is kept."""

    compile_cache: CompileCacheSpec | None = None


@dataclass(frozen=True, slots=True)
class Programs:
    """The compiled programs of one engine: parts of their key, and their folder on each host."""

    parts: Mapping[str, JsonValue]
    folder: str
    cache: CompileCacheSpec


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification of one engine: its model, its kind, and its watch.

    `paced` holds the options of the paced engine and is `None` for vLLM. `slice` is the kind of
    slice it runs on, `None` if nothing is reserved. `adapters` are the names and folders of its
    LoRA adapters, all of which it loads before it is ready. `tpu` is given for vLLM on TPU, with
    `slice`. Times are seconds.

    `version` identifies the tokens that the model may emit (`domain.models.model_version`), empty
    if nobody asks. `described` is what a gateway has to know of the model to use this engine, in
    the terms of `serving.config.application`. An engine that drains waits `stay_s` for requests
    that no other engine can continue, unless its slice is being taken away.

    An engine that is not ready after `start_timeout_s` has failed to start.

    An engine without a replica to command it ends after `lease_s`, or after `handover_s` where its
    replica left it in order. A replica takes over an engine whose `fingerprint` is its own: that of
    everything whose change replaces an engine. Empty: it takes none over, and none takes its own.

    `programs` are derived from all the rest on the first host of its slice; `None` before that, and
    without a compile cache.
    """

    model: str
    source: str
    compute_class: str
    engine_args: Mapping[str, JsonValue] = field(default_factory=dict)
    engine_env: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[tuple[str, str], ...] = ()
    paced: Mapping[str, Any] | None = None
    num_cpus: float = 0.1
    check_period_s: float = limits.CHECK_PERIOD_S
    hang_timeout_s: float = limits.CPU_HANG_TIMEOUT_S
    heartbeat_interval_s: float = limits.HEARTBEAT_INTERVAL_S
    gateway_timeout_s: float = limits.GATEWAY_TIMEOUT_S
    max_buffered_bytes: int = limits.MAX_BUFFERED_BYTES
    listens_on_loopback: bool = False
    encryption: LinkEncryption = LinkEncryption.AUTO
    slice: SliceSpec | None = None
    log_style: LogStyle = DEFAULT_STYLE
    tracing: TraceSettings = NO_TRACES
    tpu: TpuSpec | None = None
    version: str = ""
    described: Mapping[str, JsonValue] = field(default_factory=dict)
    stay_s: float = 0.0
    lease_s: float = limits.ENGINE_LEASE_S
    handover_s: float = limits.ENGINE_HANDOVER_S
    silence_s: float = limits.ENGINE_SILENCE_S
    start_timeout_s: float = limits.CPU_START_TIMEOUT_S
    fingerprint: str = ""
    programs: Programs | None = None
