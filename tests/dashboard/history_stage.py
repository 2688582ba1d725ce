"""Some minutes of a gateway's life to look at: known load, one slice taken away in the middle."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from serving.dashboard.history import History
from serving.domain.dashboard_messages import (
    ClassCounts,
    EngineUsage,
    GatewaySample,
    LedgerEntry,
    ModelCounts,
)
from serving.gateway.telemetry.request_metrics import NO_CLASS, RequestMetrics

from .fleet_stage import CHAT, CODE, NOW_S

# Of chips held, at the prices of nowhere.
_USD_PER_CHIP_HOUR = {"reserved": 1.2, "spot": 0.9}


@dataclass
class Traffic:
    """What a gateway counts second by second; `lost_s` is when its spot slice goes."""

    lost_s: int
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    tokens: Counter[str] = field(default_factory=Counter)  # by compute class
    usd: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_USD_PER_CHIP_HOUR, 0.0))

    def sample(self, second: int) -> GatewaySample:
        """The sample of this second; call it for each in turn."""
        is_short = self.lost_s <= second < self.lost_s + 40
        wave = 1 + 0.4 * math.sin(second / 45)
        for compute_class in ("reserved", "spot"):
            if not (compute_class == "spot" and is_short):
                self._serve(compute_class, wave, slow=1.6 if is_short else 1.0)
        if second == self.lost_s:
            spot = self.metrics.of_class("spot")
            spot.resumes["lost"] += 9
            spot.link_losses["lost"] += 1
        return self._sample(second, wave, is_short)

    def _serve(self, compute_class: str, wave: float, *, slow: float) -> None:
        numbers = self.metrics.of_class(compute_class)
        for _ in range(round(6 * wave + self.draw.random())):
            numbers.sequences["aborted" if self.draw.random() < 0.08 else "length"] += 1
            numbers.to_first_token.observe(self.draw.lognormvariate(-2.2, 0.5) * slow)
            numbers.per_output_token.observe(self.draw.gauss(0.021, 0.003) * slow)
        self.tokens[compute_class] += round(900 * wave / slow + self.draw.gauss(0, 25))

    def _sample(self, second: int, wave: float, is_short: bool) -> GatewaySample:
        classes, engines, ledger = [], [], []
        bounds = self.metrics.of_class(NO_CLASS)
        for compute_class in sorted(self.metrics.classes.keys() - {NO_CLASS}):
            numbers = self.metrics.classes[compute_class]
            is_gone = compute_class == "spot" and is_short
            classes.append(
                ClassCounts(
                    model=CHAT,
                    compute_class=compute_class,
                    sequences=dict(numbers.sequences),
                    resumes=dict(numbers.resumes),
                    link_losses=dict(numbers.link_losses),
                    output_tokens=self.tokens[compute_class],
                    to_first_token=tuple(numbers.to_first_token.counts),
                    per_output_token=tuple(numbers.per_output_token.counts),
                    in_flight=0 if is_gone else round(18 * wave),
                )
            )
            if not is_gone:
                engines.append(EngineUsage(compute_class, CHAT, 0.45 * wave))
                self.usd[compute_class] += 16 * _USD_PER_CHIP_HOUR[compute_class] / 3600
            state, usd = "provisioning" if is_gone else "serving", self.usd[compute_class]
            ledger.append(LedgerEntry(CHAT, compute_class, state, 16, usd if not is_gone else None))
            ledger.append(LedgerEntry(CHAT, compute_class, "idle", 0, None))
        return GatewaySample(
            "",
            float(second),
            bounds.to_first_token.bounds,
            bounds.per_output_token.bounds,
            models=(ModelCounts(CHAT, 7 if is_short else 0, 0), ModelCounts(CODE, 0, 0)),
            classes=tuple(classes),
            engines=tuple(engines),
            ledger=tuple(ledger),
        )


def example_history(
    *gateway_ids: str,
    dashboard_id: str = "5f0c2a9b41de",
    num_seconds: int = 290,
    lost_s: int = 150,
    silent: range = range(0),
) -> History:
    """A history that ends at `NOW_S`. In the seconds `silent` no gateway reported."""
    began_s = NOW_S - num_seconds + 0.5
    history = History(dashboard_id, began_s - 2)
    for second, sample in enumerate(samples(num_seconds, lost_s)):
        if second not in silent:
            for gateway_id in gateway_ids or ("5f0c2a9b41de",):
                history.take(replace(sample, gateway_id=gateway_id), began_s + second)
    return history


def samples(num_seconds: int, lost_s: int) -> Iterator[GatewaySample]:
    """The samples of so many seconds, of a gateway without a name."""
    traffic = Traffic(lost_s)
    for second in range(num_seconds):
        yield traffic.sample(second)
