"""Decides whether traffic should come to this Ray cluster's gateways, and says why. Pure.

`/ready` is what load balancers and probes ask. It is not the health of a process: while a cluster
has not had a single engine, its gateways are alive and nobody should be sent to them. Once the
cluster is open it stays open: requests then wait for an engine, up to their deadline. What is
open is remembered by `open_latch`; what the facts are is read by the gateway's parts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serving.config.models import ModelConfig
from serving.domain.slice_records import Snapshot

# How long no replica may be listed before that means that none is wanted. A replica that starts is
# listed within seconds, on a busy machine within about 20 s.
QUIET_S = 30.0


@dataclass(frozen=True, slots=True)
class ReadinessFacts:
    """What one gateway knows of its cluster.

    `num_ready` are the engines linked here that take requests, of all models. `num_required` are
    the engines that the configuration wants whatever the load; `None` until a directory has said
    which models there are. `replicas` is the number of listed slice replicas by state. `quiet_s` is
    for how many seconds the directory has listed none; `None` while it lists some or is silent.
    `is_open`: the cluster was opened before.
    """

    num_ready: int
    num_required: int | None
    replicas: Mapping[str, int]
    quiet_s: float | None
    is_open: bool


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer of `/ready`, and the reason for it in plain words."""

    is_ready: bool
    reason: str


def decide_readiness(facts: ReadinessFacts) -> Readiness:
    """Returns whether this cluster can serve: now, as before, or from its first request on."""
    if facts.num_ready:
        return Readiness(is_ready=True, reason="engines take requests")
    if facts.is_open:
        reason = "this cluster has served before: requests wait for an engine"
        return Readiness(is_ready=True, reason=reason)
    if facts.num_required is None:
        return Readiness(is_ready=False, reason="the fleet directory has not answered yet")
    listed = ", ".join(f"{count} {state}" for state, count in sorted(facts.replicas.items()))
    if listed or facts.num_required:
        wanted = f"{facts.num_required} wanted at least; slice replicas: {listed or 'none yet'}"
        return Readiness(is_ready=False, reason=f"no engine has been ready yet: {wanted}")
    if facts.quiet_s is None or facts.quiet_s < QUIET_S:
        reason = f"no engine is wanted, which has to last {QUIET_S:g} s before it counts"
        return Readiness(is_ready=False, reason=reason)
    reason = "no engine is wanted: the first request asks for one"
    return Readiness(is_ready=True, reason=reason)


def required_engines(models: Iterable[ModelConfig]) -> int:
    """Returns how many engines the models have whatever their load."""
    return sum(
        deployment.num_engines
        * (deployment.replicas if deployment.min_replicas is None else deployment.min_replicas)
        for model in models
        for deployment in model.deployments
    )


def listed_replicas(snapshot: Snapshot) -> dict[str, int]:
    """Returns the number of listed slice replicas by the state of their slice."""
    return dict(Counter(str(record.state) for record in snapshot.records if record.has_engine))
