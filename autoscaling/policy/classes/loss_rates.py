"""How often slices of a class are taken away: by the operator's word and by experience. Pure.

What was seen fades with time, whether the class is held or not, and the operator's word is left.
Else a class with some bad hours would stay as bad as it was for ever: it is not bought, so nothing
better is seen of it. Time comes in.
"""

import math
from dataclasses import dataclass

from autoscaling.policy.memory import ClassRecord
from serving.domain.compute_class import ComputeClass

# What the operator's rate of losses weighs, in slice-hours of experience.
_PRIOR_HOURS = 24.0
# What it weighs for the loss of all at once, in hours in which slices of the class are held.
_PRIOR_OUTAGE_HOURS = 12.0
# In so long what was seen loses half its weight. A class that is always held is then known by 35
# hours, which is three times what the operator's word weighs, and whole days, as a market has good
# and bad times of the day. One that was lost each hour of half a day is believed to be lost every
# 20 hours after five days, if nobody would lose it, and is tried again.
_HALF_LIFE_H = 24.0


@dataclass(slots=True)
class LossRates:
    """What was seen of a class: in how many hours, and how much was taken away in them.

    `held_hours` are of each slice, `had_hours` those in which there was any. An outage is the loss
    of half of the slices or more at once. All four fade.
    """

    held_hours: float = 0.0
    had_hours: float = 0.0
    num_losses: float = 0.0
    num_outages: float = 0.0
    _at_s: float | None = None

    @classmethod
    def from_record(cls, record: ClassRecord, written_at_s: float) -> "LossRates":
        """Returns what was seen until the record was written."""
        counts = record.num_losses, record.num_outages
        return cls(record.held_hours, record.had_hours, *counts, written_at_s)

    def observe(self, now_s: float, num_held: int, num_taken: int) -> None:
        """Takes in that so many were held since the last look, and so many taken away.

        Nobody knows what was held before the first look, or before one after a restart: pass 0.
        """
        elapsed_h = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s) / 3600
        self._at_s = now_s
        kept = 0.5 ** (elapsed_h / _HALF_LIFE_H)
        # Of those hours, too, the earlier ones have faded.
        new_hours = (1 - kept) * _HALF_LIFE_H / math.log(2)
        self.held_hours = kept * self.held_hours + num_held * new_hours
        self.had_hours = kept * self.had_hours + (new_hours if num_held else 0.0)
        self.num_losses = kept * self.num_losses + num_taken
        is_outage = num_taken >= max(1, num_held / 2)
        self.num_outages = kept * self.num_outages + is_outage

    def losses_per_hour(self, terms: ComputeClass) -> float:
        """The expected losses of one slice in an hour, as configured and as observed."""
        prior = terms.losses_per_hour * _PRIOR_HOURS
        return (prior + self.num_losses) / (_PRIOR_HOURS + self.held_hours)

    def outages_per_hour(self, terms: ComputeClass) -> float:
        """The expected losses of half the class or more at once, per hour in which it is held."""
        prior = terms.losses_per_hour * _PRIOR_OUTAGE_HOURS
        return (prior + self.num_outages) / (_PRIOR_OUTAGE_HOURS + self.had_hours)
