"""What engines did in the last half minute, from the sums that their hosts tell. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from serving.domain.capacity.engine_rates import EngineRate
from serving.gateway.telemetry.request_metrics import WINDOW_S
from serving.link.messages import EngineStats

# Sums that are closer together than this tell no rate: they are up to a second old.
_LEAST_S = 0.8 * WINDOW_S


@dataclass(frozen=True, slots=True)
class _Sums:
    at_s: float
    prompt_tokens: int  # computed
    output_tokens: int
    num_steps: int
    busy_s: float
    kv_usage_ratio: float


class EngineWork:
    """Remembers the sums of the engines that one gateway shows."""

    def __init__(self) -> None:
        self._sums: dict[str, deque[_Sums]] = {}

    def look(
        self, now_s: float, engines: Iterable[tuple[str, str, EngineStats, float]]
    ) -> list[EngineRate]:
        """Returns the rates of these engines: id, compute class, and what its host told last.

        That is its sums, and the share of its KV cache in use.

        An engine that is not among them is forgotten. One that is new, or has begun anew, has no
        rate for half a minute; one that made no step has none.
        """
        kept: dict[str, deque[_Sums]] = {}
        rates = []
        for engine_id, compute_class, stats, kv_usage_ratio in engines:
            sums = self._sums.get(engine_id, deque())
            cached = stats.local_cached_tokens + stats.external_cached_tokens
            computed = max(0, stats.prompt_tokens - cached)
            last = _Sums(
                now_s,
                computed,
                stats.generation_tokens,
                stats.num_steps,
                stats.busy_s,
                kv_usage_ratio,
            )
            if sums and last.num_steps < sums[-1].num_steps:
                sums = deque()
            sums.append(last)
            while len(sums) > 1 and sums[1].at_s <= now_s - WINDOW_S:
                sums.popleft()
            kept[engine_id] = sums
            first = sums[0]
            span_s, num_steps = now_s - first.at_s, last.num_steps - first.num_steps
            if span_s >= _LEAST_S and num_steps > 0:
                rates.append(
                    EngineRate(
                        engine_id,
                        compute_class,
                        (last.prompt_tokens - first.prompt_tokens) / span_s,
                        (last.output_tokens - first.output_tokens) / span_s,
                        (last.busy_s - first.busy_s) / num_steps,
                        sum(each.kv_usage_ratio for each in sums) / len(sums),
                    )
                )
        self._sums = kept
        return rates
