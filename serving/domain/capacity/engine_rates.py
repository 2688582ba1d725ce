"""What single engines do in a second, as gateways report it to Serve's controller, and back.

Serve carries `{name: number}` to an autoscaling policy (`domain.load_report`), so the rest stands
in the name. No model, compute class or engine id contains a bar:

    engine|<model>|<compute class>|<engine>|<what>                              value

Owns the encoding and both of its ends. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

_BAR = "|"
_KIND = "engine"


@dataclass(frozen=True, slots=True)
class EngineRate:
    """What one engine did in the last half minute, for all gateways.

    `prompt_tokens_per_s` were computed, without those that its cache had; `output_tokens_per_s`
    were emitted. `step_s` is the mean length of its steps, those left out that followed none.
    `kv_usage_ratio` is the share of its KV cache, 0 to 1, that sequences lately had on average; 0
    where it tells none.
    """

    engine_id: str
    compute_class: str
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    step_s: float
    kv_usage_ratio: float = 0.0

    @property
    def num_running(self) -> float:
        """The sequences in a step, on average: a step gives each a token."""
        return self.output_tokens_per_s * self.step_s

    def of_slice(self, num_engines: int) -> "EngineRate":
        """Returns what a slice would do on which `num_engines` do the same as this one.

        A profile is of whole slices, so it is what a policy compares with it.
        """
        return replace(
            self,
            prompt_tokens_per_s=num_engines * self.prompt_tokens_per_s,
            output_tokens_per_s=num_engines * self.output_tokens_per_s,
        )


_NEEDED = frozenset({"prompt_tokens_per_s", "output_tokens_per_s", "step_s"})
# An engine's gateway of an earlier build tells none.
_TOLD = (*sorted(_NEEDED), "kv_usage_ratio")


def rate_stats(model: str, rates: Iterable[EngineRate]) -> dict[str, float]:
    """Returns the rates of a model's engines as stats."""
    stats = {}
    for rate in rates:
        for what in _TOLD:
            name = _BAR.join((_KIND, model, rate.compute_class, rate.engine_id, what))
            stats[name] = float(getattr(rate, what))
    return stats


def rates_of_stats(model: str, stats: Mapping[str, float]) -> tuple[EngineRate, ...]:
    """Returns the rates of the model's engines, by id; what is not whole is left out."""
    values: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    prefix = _BAR.join((_KIND, model, ""))
    for name, value in stats.items():
        if name.startswith(prefix):
            compute_class, engine_id, what = name.removeprefix(prefix).split(_BAR)
            values[engine_id, compute_class][what] = value
    return tuple(
        EngineRate(engine_id, compute_class, **fields)
        for (engine_id, compute_class), fields in sorted(values.items())
        if _NEEDED <= fields.keys() <= {*_TOLD}
    )
