"""Some minutes of a gateway's life to look at: known load, one slice taken away in the middle."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from serving.dashboard.history import History
from serving.gateway.metrics.requests import Families
from serving.gateway.telemetry.request_metrics import NO_CLASS, RequestMeter

from .fleet_stage import CHAT, NOW_S

# Of chips held, at the prices of nowhere.
_USD_PER_CHIP_HOUR = {"reserved": 1.2, "spot": 0.9}


@dataclass
class Traffic:
    """What a gateway counts second by second; `lost_s` is when its spot slice goes."""

    lost_s: int
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    meter: RequestMeter = field(default_factory=RequestMeter)
    tokens: Counter[str] = field(default_factory=Counter)  # by compute class
    usd: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_USD_PER_CHIP_HOUR, 0.0))

    def page(self, second: int) -> Families:
        """The families of this second; call it for each in turn."""
        is_short = self.lost_s <= second < self.lost_s + 40
        wave = 1 + 0.4 * math.sin(second / 45)
        for compute_class in ("reserved", "spot"):
            if not (compute_class == "spot" and is_short):
                self._serve(compute_class, wave, slow=1.6 if is_short else 1.0)
        if second == self.lost_s:
            spot = self.meter.of_class("spot")
            spot.resumes["lost"] += 9
            spot.link_losses["lost"] += 1
        return self._families(wave, is_short)

    def _serve(self, compute_class: str, wave: float, *, slow: float) -> None:
        numbers = self.meter.of_class(compute_class)
        for _ in range(round(6 * wave + self.draw.random())):
            numbers.sequences["aborted" if self.draw.random() < 0.08 else "length"] += 1
            numbers.to_first_token.observe(self.draw.lognormvariate(-2.2, 0.5) * slow)
            numbers.per_output_token.observe(self.draw.gauss(0.021, 0.003) * slow)
        self.tokens[compute_class] += round(900 * wave / slow + self.draw.gauss(0, 25))

    def _families(self, wave: float, is_short: bool) -> Families:
        families = Families()
        for compute_class in sorted(self.meter.classes.keys() - {NO_CLASS}):
            numbers = self.meter.classes[compute_class]
            labels = {"model": CHAT, "compute_class": compute_class}
            is_gone = compute_class == "spot" and is_short
            for name, value in (
                ("slicewise_time_to_first_token_seconds", numbers.to_first_token),
                ("slicewise_time_per_output_token_seconds", numbers.per_output_token),
                ("slicewise_output_tokens_total", self.tokens[compute_class]),
                ("slicewise_sequences_in_flight", 0 if is_gone else round(18 * wave)),
            ):
                families.add(name, labels, value)
            for name, label, counts in (
                ("slicewise_sequences_total", "outcome", numbers.sequences),
                ("slicewise_resumes_total", "cause", numbers.resumes),
                ("slicewise_link_losses_total", "cause", numbers.link_losses),
            ):
                for text, count in counts.items():
                    families.add(name, labels | {label: text}, count)
            for state, chips in (("provisioning" if is_gone else "serving", 16), ("idle", 0)):
                families.add("slicewise_ledger_chips", labels | {"state": state}, chips)
            if not is_gone:
                families.add("slicewise_engine_kv_usage_ratio", labels, 0.45 * wave)
                self.usd[compute_class] += 16 * _USD_PER_CHIP_HOUR[compute_class] / 3600
            usd = self.usd[compute_class]
            families.add("slicewise_ledger_cost_usd_total", labels | {"state": "serving"}, usd)
        waiting = 7 if is_short else 0
        families.add("slicewise_requests_waiting", {"model": CHAT}, waiting)
        return families


def example_history(
    gateway_id: str = "5f0c2a9b41de",
    *,
    num_seconds: int = 290,
    lost_s: int = 150,
    silent: range = range(0),
) -> History:
    """A history that ends at `NOW_S`. In the seconds `silent` the gateway did not look."""
    began_s = NOW_S - num_seconds + 0.5
    history = History(gateway_id, began_s - 2)
    for second, page in enumerate(pages(num_seconds, lost_s)):
        if second not in silent:
            history.observe(page, began_s + second)
    return history


def pages(num_seconds: int, lost_s: int) -> Iterator[Families]:
    """The metrics pages of so many seconds."""
    traffic = Traffic(lost_s)
    for second in range(num_seconds):
        yield traffic.page(second)
