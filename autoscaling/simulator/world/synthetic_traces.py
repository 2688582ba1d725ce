"""Generates an hour of requests like those of Azure's traces, for scenarios without the files.

Owns the fitted numbers and the generator. Each was fitted on 2026-11-21 to a trace of
Azure/AzurePublicDataset @ b469a113 (2023-11-16, an hour, CC-BY-4.0, cite Splitwise, ISCA'24):
lengths by mean and standard deviation of their logarithms, cut off at the trace's largest; bursts
by a rate that wanders lognormally, with its spread and memory set so that the counts' coefficients
of variation over 1, 10 and 60 s come near the trace's. The conversation trace's two humps of output
lengths are not kept. Pure: chance comes in as a seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoscaling.simulator.world.arrivals import Requests

_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """The lognormal lengths in tokens: mean and spread of the logarithm, cut off at `most`."""

    log_mean: float
    log_spread: float
    most: int

    def draw(self, num: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
        """Draws `num` lengths, at least 1."""
        lengths = np.exp(rng.normal(self.log_mean, self.log_spread, num))
        return np.asarray(np.clip(np.rint(lengths), 1, self.most), np.int32)


@dataclass(frozen=True, slots=True)
class TraceLaw:
    """The shape of one trace.

    The logarithm of the rate wanders with a standard deviation of `rate_spread` and `memory_s`, up
    to `most_spreads` standard deviations above its mean.
    """

    requests_per_s: float
    input_tokens: LengthLaw
    output_tokens: LengthLaw
    rate_spread: float
    memory_s: float
    most_spreads: float


TRACE_LAWS: Mapping[str, TraceLaw] = {
    "azure-conv": TraceLaw(
        5.53, LengthLaw(6.633, 0.985, 14_050), LengthLaw(5.019, 0.859, 1_000), 0.25, 60.0, 2.0
    ),
    "azure-code": TraceLaw(
        2.57, LengthLaw(6.999, 1.360, 7_437), LengthLaw(2.788, 0.847, 1_899), 1.6, 20.0, 1.7
    ),
}


def synthetic_hour(law: TraceLaw, seed: int, span_s: float = 3600.0) -> Requests:
    """Generates requests over `span_s` by `law`."""
    rng = np.random.default_rng(seed)
    wander = _wander(round(span_s / _STEP_S), law.memory_s / _STEP_S, rng)
    rate = np.exp(law.rate_spread * np.minimum(wander, law.most_spreads))
    rate *= law.requests_per_s / rate.mean()
    counts = rng.poisson(rate * _STEP_S)
    arrival_s = np.repeat(np.arange(len(counts)) * _STEP_S, counts)
    arrival_s = np.sort(arrival_s + rng.uniform(0.0, _STEP_S, len(arrival_s)))
    num = len(arrival_s)
    return Requests(arrival_s, law.input_tokens.draw(num, rng), law.output_tokens.draw(num, rng))


def _wander(num: int, memory: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Returns a standard normal process whose correlation falls to 1/e over `memory` steps."""
    keep = float(np.exp(-1 / memory))
    shocks = rng.normal(0.0, np.sqrt(1 - keep**2), num)
    shocks[0] = rng.normal()
    values = np.empty(num)
    now = 0.0
    for each, shock in enumerate(shocks):
        now = keep * now + shock
        values[each] = now
    return values
