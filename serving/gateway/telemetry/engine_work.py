"""What engines did lately, from the sums that their hosts tell. Pure."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serving.domain.capacity.batch_lines import EnginePace, mean_step
from serving.domain.capacity.engine_rates import EngineRate
from serving.gateway.telemetry.request_metrics import WINDOW_S
from serving.link.messages import EngineStats

# Sums that are closer together than this tell no rate: they are up to a second old.
_LEAST_S = 0.8 * WINDOW_S
# Steps are looked at over so long: hosts tell their sums every second. Longer ago than that is what
# was seen at the last batch.
_STEPS_S, _LONGEST_S = 3.0, 60.0


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


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """The steps that one engine has made, the time in them, and the sequences that it has now."""

    num_steps: int
    busy_s: float
    num_sequences: int


class StepPace:
    """How long the steps of a model's engines took in the last seconds."""

    def __init__(self) -> None:
        self._before: dict[str, EngineSteps] = {}
        self._looked_s = -math.inf
        self._seen: tuple[float, float] | None = None  # sequences, and the length of their steps

    def look(
        self, now_s: float, engines: Mapping[str, EngineSteps], most_s: float
    ) -> EnginePace | None:
        """Returns the pace of these engines, by id, whose steps are to take `most_s` at most.

        The steps of an engine count by its sequences. `None` before the second look in a minute,
        and where no engine made a step. What is known is of some seconds ago, if it is asked for
        sooner again.
        """
        if now_s - self._looked_s >= _STEPS_S:
            is_long_ago = now_s - self._looked_s > _LONGEST_S
            self._seen = None if is_long_ago else self._between(engines)
            self._looked_s, self._before = now_s, dict(engines)
        return None if self._seen is None else EnginePace(*self._seen, most_s)

    def _between(self, engines: Mapping[str, EngineSteps]) -> tuple[float, float] | None:
        return mean_step(
            (now.num_sequences, (now.busy_s - before.busy_s) / (now.num_steps - before.num_steps))
            for engine_id, now in engines.items()
            if (before := self._before.get(engine_id)) and now.num_steps > before.num_steps
        )
