"""Small days, terms and policies that the simulator's tests share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoscaling.records import Observation, Plan
from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.arrivals import Requests, constant_lengths, draw_poisson, stages
from autoscaling.simulator.world.engines import Engines, GatewayLimits
from autoscaling.simulator.world.slices import ClassSetup, Conditions
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass

OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.03)


def profile(**changes: object) -> CapacityProfile:
    fields: dict[str, object] = {
        "model": "tiny",
        "engine": "paced",
        "base_s": 0.01,
        "per_sequence_s": 0.0004,
        "per_prompt_token_s": 0.00004,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "measured_on": "2026-11-20",
        "source": "made up for tests",
    }
    return CapacityProfile.model_validate(fields | changes)


def steady(rate: float, duration_s: float, seed: int = 1) -> Requests:
    return draw_poisson(stages((duration_s, rate)), constant_lengths(300, 60), seed)


def class_setup(
    name: str = "spot",
    capacity: CapacitySeries | None = None,
    *,
    provisioning_s: float = 60.0,
    load_s: float = 40.0,
    losses_per_hour: float = 0.0,
    notice_s: float = 30.0,
    **terms: object,
) -> ClassSetup:
    known = ComputeClass(name, **({"usd_per_slice_hour": 1.0, "max_slices": 50} | terms))  # type: ignore[arg-type]
    return ClassSetup(
        known,
        Conditions(
            capacity,
            provisioning_s,
            load_s,
            losses_per_hour,
            provisioning_spread=0.0,
            load_spread=0.0,
            notice_s=notice_s,
        ),
    )


@dataclass
class Scripted:
    """Targets by the time they hold from; keeps what it was shown."""

    script: Sequence[tuple[float, Mapping[str, int]]]
    drain_order: tuple[str, ...] = ()
    name: str = "scripted"
    seen: list[Observation] = field(default_factory=list)

    def decide(self, observation: Observation) -> Plan:
        self.seen.append(observation)
        targets = [each for at_s, each in self.script if at_s <= observation.now_s][-1]
        return Plan(observation.now_s, targets, drain_order=self.drain_order)


def always(**targets: int) -> Scripted:
    return Scripted([(0.0, targets)])


def run_day(
    requests: Requests,
    policy: Scripted,
    *classes: ClassSetup,
    duration_s: float = 1000.0,
    **changes: object,
) -> SimulationOutcome:
    fields: dict[str, object] = {
        "requests": requests,
        "profile": profile(),
        "classes": classes,
        "objectives": OBJECTIVES,
        "duration_s": duration_s,
        "limits": GatewayLimits(max_waiting_requests=1_000_000),
    }
    return simulate(SimulationSetup(**(fields | changes)), policy)  # type: ignore[arg-type]


def varied(num: int, rate: float, seed: int) -> Requests:
    """Poisson arrivals with lengths that differ much."""
    rng = np.random.default_rng(seed)
    return Requests(
        np.cumsum(rng.exponential(1 / rate, num)),
        np.ceil(rng.lognormal(5.5, 1.2, num)).astype(np.int32),
        np.ceil(rng.lognormal(3.0, 1.2, num)).astype(np.int32),
    )


def come_or_go(
    engines: Engines, slots: list[int], rng: np.random.Generator, now_s: float, most: int
) -> None:
    """Opens an engine, ends the oldest at once, or drains it first; `slots` are those there are."""
    if len(slots) < 2 or (rng.random() < 0.5 and len(slots) < most):
        slots.append(engines.open(now_s))
    elif rng.random() < 0.5:
        engines.close(slots.pop(0), now_s)
    else:
        engines.drain(slots[0], now_s)
        engines.leave(slots[0], now_s, now_s + 1.0)
        engines.close(slots.pop(0), now_s)
