"""Implements SkyServe's SpotHedge: spread spot over zones, keep a reserve, fall back on demand.

Sources: Mao et al., "SkyServe: Serving AI Models across Regions and Clouds with Spot Instances"
(EuroSys'25, arXiv 2411.01438), and github.com/skypilot-org/skypilot, sky/serve/autoscalers.py and
spot_placer.py (read 2026-11-21):

    n_target    = ceil(requests/s over 60 s / target per replica), every 20 s, after a delay
    spot        = n_target + n_extra - n_base
    on_demand   = min(n_target, n_base + max(0, spot - ready spot))

Placement: a zone is active until it preempts a replica or fails to start one, and active again as
soon as one is ready there. A new replica goes to an active zone that has none, else to any active
one, and there to the cheapest; how many a zone has does not count. Of equal prices the source takes
whichever its list has first, which is an accident; here one is drawn. When fewer than two zones are
active, all are again, so with two zones none is ever avoided. What goes when fewer are wanted is
what is not ready yet, then the youngest, in whatever zone.

Parameters: the target rate is that of `sizing`, n_base is 0. The authors' settings are SkyServe's
defaults: n_extra 1, delays of 300 s up and 1200 s down. The quick ones are ours: n_extra 2, delays
of 30 s and 600 s as Ray Serve's. The slices that are there when it begins are its first n_target. A
spot class is a zone. An order that is still without a
slice after twice the usual time of provisioning is a failed start. Prepaid slices count as on
demand, since they are held anyway.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaling.records import Decision, Fleet, Observation, Plan, SliceView
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from autoscaling.simulator.baselines.sizing import Sizing
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import WAITING, SliceState

QPS_WINDOW_S = 60.0
DECISION_INTERVAL_S = 20.0
START_FAILS_AFTER = 2.0  # times the class's usual time of provisioning
_SHORTEST_START_S = 60.0


@dataclass(frozen=True, slots=True)
class HedgeSettings:
    """The spare spot slices, and for how long a change must have been wanted, in seconds."""

    num_extra: int
    upscale_delay_s: float
    downscale_delay_s: float


AUTHORS_SETTINGS = HedgeSettings(1, 300.0, 1200.0)
QUICK_SETTINGS = HedgeSettings(2, 30.0, 600.0)


class SpotHedge:
    """Remembers the rate of the last minute, the direction it wants, and which zones failed it."""

    name = "spothedge"

    def __init__(
        self, terms: Sequence[ComputeClass], sizing: Sizing, settings: HedgeSettings
    ) -> None:
        self._settings = settings
        self._layout = SingleClassLayout.of(terms)
        self._zones = {each.name: each for each in terms if each.is_revocable}
        self._target_rate = sizing.requests_per_s
        self._begun = False
        self._target = self._layout.min_slices
        self._active = set(self._zones)
        self._placed = Counter(dict.fromkeys(self._zones, 0))
        self._rates: deque[tuple[float, float]] = deque()
        self._decided_at_s = -math.inf
        self._chance = random.Random(0)
        # When the need for more (or for fewer) began; `None` while there is none.
        self._up_since_s: float | None = None
        self._down_since_s: float | None = None

    def decide(self, observation: Observation) -> Plan:
        """The plan for the zones as they are now; the number wanted moves every 20 s at most."""
        now_s = observation.now_s
        if not self._begun:
            self._begin(observation.fleet)
        if observation.load is not None:
            self._rates.append((now_s, observation.load.requests_per_s))
            while self._rates[0][0] <= now_s - QPS_WINDOW_S:
                self._rates.popleft()
            if now_s - self._decided_at_s >= DECISION_INTERVAL_S - 1e-6:
                self._decided_at_s = now_s
                self._aim(now_s)
        self._judge_zones(observation)
        wanted = max(0, self._target - self._layout.num_prepaid) + self._settings.num_extra
        self._leave(self._placed.total() - wanted, observation.fleet)
        self._place(wanted)
        return self._plan(observation)

    def _begin(self, fleet: Fleet) -> None:
        self._begun = True
        self._placed = Counter({name: fleet.targets.get(name, 0) for name in self._zones})
        self._target = self._layout.held(fleet) + self._placed.total()

    def _aim(self, now_s: float) -> None:
        """Applies SkyServe's hysteresis: a change is granted once it was wanted for its delay."""
        rate = sum(each for _, each in self._rates) / len(self._rates)
        most = self._layout.max_slices + sum(each.max_slices for each in self._zones.values())
        wanted = min(max(math.ceil(rate / self._target_rate), self._layout.min_slices), most)
        if wanted > self._target:
            self._down_since_s = None
            self._up_since_s = now_s if self._up_since_s is None else self._up_since_s
            if now_s - self._up_since_s >= self._settings.upscale_delay_s:
                self._target, self._up_since_s = wanted, None
        elif wanted < self._target:
            self._up_since_s = None
            self._down_since_s = now_s if self._down_since_s is None else self._down_since_s
            if now_s - self._down_since_s >= self._settings.downscale_delay_s:
                self._target, self._down_since_s = wanted, None
        else:
            self._up_since_s = self._down_since_s = None

    def _judge_zones(self, observation: Observation) -> None:
        """Subtracts what was lost or never came, and updates which zones are active."""
        fleet = observation.fleet
        for loss in fleet.losses:
            if loss.compute_class in self._zones:
                self._give_up(loss.compute_class, 1)
        for name, zone in self._zones.items():
            slices = fleet.of_class(name)
            patience_s = max(_SHORTEST_START_S, START_FAILS_AFTER * zone.provisioning_s)
            stuck = sum(
                1
                for each in slices
                if each.state in WAITING and observation.now_s - each.requested_at_s > patience_s
            )
            if stuck:
                self._give_up(name, stuck)
            elif any(each.state == SliceState.READY for each in slices) and not any(
                loss.compute_class == name for loss in fleet.losses
            ):
                self._active.add(name)

    def _give_up(self, zone: str, count: int) -> None:
        self._placed[zone] = max(0, self._placed[zone] - count)
        self._active.discard(zone)
        if len(self._active) < min(2, len(self._zones)):
            self._active = set(self._zones)

    def _place(self, wanted: int) -> None:
        """Brings the spot slices up to `wanted`: one at a time, as SkyServe launches them."""
        while self._placed.total() < wanted:
            free = [
                name for name in self._active if self._placed[name] < self._zones[name].max_slices
            ]
            if not free:
                return
            candidates = [name for name in free if not self._placed[name]] or free
            least = min(self._zones[name].price for name in candidates)
            cheapest = sorted(name for name in candidates if self._zones[name].price == least)
            self._placed[self._chance.choice(cheapest)] += 1

    def _leave(self, count: int, fleet: Fleet) -> None:
        """Takes so many spot slices away: orders that are not seen yet, then the first to go."""
        going = _first_to_go(fleet, self._zones)
        seen = Counter(each.compute_class for each in going)
        unseen = [name for name in self._zones for _ in range(self._placed[name] - seen[name])]
        for name in [*unseen, *(each.compute_class for each in going)][: max(0, count)]:
            self._placed[name] = max(0, self._placed[name] - 1)

    def _plan(self, observation: Observation) -> Plan:
        fleet = observation.fleet
        needed = max(0, self._target - self._layout.num_prepaid)
        ready = _ready_spot(fleet, self._zones)
        name, most = self._layout.on_demand.name, self._layout.on_demand.max_slices
        fallback = min(needed, max(0, needed + self._settings.num_extra - ready), most)
        targets = {each: 0 for each in self._layout.others if each not in self._zones}
        targets |= {each.name: each.max_slices for each in self._layout.prepaid}
        targets |= {zone: self._placed[zone] for zone in self._zones} | {name: fallback}
        reason = (
            f"{needed} wanted + {self._settings.num_extra} spare spot, {ready} spot ready: "
            f"{fallback} on demand; active zones: {', '.join(sorted(self._active)) or 'none'}"
        )
        decisions = tuple(
            Decision(each, target - fleet.targets.get(each, 0), reason)
            for each, target in targets.items()
            if target != fleet.targets.get(each, 0)
        )
        return Plan(
            observation.now_s, targets, decisions, demand_slices=float(self._target),
            drain_order=tuple(each.slice_id for each in _first_to_go(fleet, self._zones)),
            arithmetic=reason,
        )  # fmt: skip


def _first_to_go(fleet: Fleet, zones: Mapping[str, ComputeClass]) -> list[SliceView]:
    """Returns the spot slices in the order in which they go: what is not ready, the youngest."""
    spot = (each for name in zones for each in fleet.of_class(name))
    return sorted(
        (each for each in spot if each.state != SliceState.DRAINING),
        key=lambda each: (each.state == SliceState.READY, -each.requested_at_s, each.slice_id),
    )


def _ready_spot(fleet: Fleet, zones: dict[str, ComputeClass]) -> int:
    return sum(
        1 for each in fleet.slices if each.compute_class in zones and each.state == SliceState.READY
    )
