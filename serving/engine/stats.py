"""Adds up an engine's work step by step. Pure: callers pass the time of their own clock.

Owns the sums and the choice of steps with a known length. Does not own the source of the numbers
(the engines), their readers, nor the tokens' tenants (`link.server`).
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from serving.link.messages import ITERATION_BOUNDS, EngineStats

# After so many prompt tokens, what was computed of those before counts half.
_RATIO_HALF_LIFE_TOKENS = 65_536


@dataclass(slots=True)
class StepCount:
    """The numbers of one step. `computed_tokens` are prompt tokens that no cache had."""

    generation_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    local_cached_tokens: int = 0
    external_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class StatsCollector:
    """The sums since the engine's start. `None` means that the engine has no such feature."""

    num_deferred: int = 0
    prefix_cache: tuple[int, int] | None = None
    external_prefix_cache: tuple[int, int] | None = None
    drafts: tuple[int, int, int] | None = None
    accepted_by_position: list[int] = field(default_factory=list)
    _sums: StepCount = field(default_factory=StepCount)
    _num_steps: int = 0
    _busy_s: float = 0.0
    _iteration_tokens: int = 0
    _iteration_counts: list[int] = field(default_factory=lambda: [0] * (len(ITERATION_BOUNDS) + 1))
    # Prompt tokens, and those of them that were computed, the latest with the most weight.
    _recent: tuple[float, float] = (0.0, 0.0)
    # When the step before ended with more to do; None: the engine has been idle since.
    _since_s: float | None = None

    def stepped(self, step: StepCount, at_s: float, *, goes_on: bool) -> None:
        """Counts a step that ended; `goes_on` means that the next one follows at once.

        Only a step that followed another at once has a known length and counts in the step time.
        """
        sums = self._sums
        sums.generation_tokens += step.generation_tokens
        sums.prompt_tokens += step.prompt_tokens
        sums.local_cached_tokens += step.local_cached_tokens
        sums.external_cached_tokens += step.external_cached_tokens
        sums.num_preemptions += step.num_preemptions
        if step.prompt_tokens:
            kept = 0.5 ** (step.prompt_tokens / _RATIO_HALF_LIFE_TOKENS)
            prompt, computed = self._recent
            self._recent = (
                prompt * kept + step.prompt_tokens,
                computed * kept + step.computed_tokens,
            )
        tokens = step.computed_tokens + step.generation_tokens
        self._iteration_tokens += tokens
        self._iteration_counts[bisect_left(ITERATION_BOUNDS, tokens)] += 1
        if self._since_s is not None:
            self._num_steps += 1
            self._busy_s += max(0.0, at_s - self._since_s)
        self._since_s = at_s if goes_on else None

    def looked_up(self, queried: int, found: int) -> None:
        """Counts tokens looked up in the prefix cache, and those found."""
        before = self.prefix_cache or (0, 0)
        self.prefix_cache = (before[0] + queried, before[1] + found)

    def looked_up_outside(self, queried: int, found: int) -> None:
        """Counts tokens looked up in a cache behind a KV connector, and those found."""
        before = self.external_prefix_cache or (0, 0)
        self.external_prefix_cache = (before[0] + queried, before[1] + found)

    def drafted(self, drafts: int, tokens: int, accepted: int, by_position: list[int]) -> None:
        """Counts drafts and tokens of speculative decoding, and accepted ones, also by position."""
        before = self.drafts or (0, 0, 0)
        self.drafts = (before[0] + drafts, before[1] + tokens, before[2] + accepted)
        sums = self.accepted_by_position
        sums.extend([0] * (len(by_position) - len(sums)))
        for position, count in enumerate(by_position):
            sums[position] += count

    @property
    def computed_ratio(self) -> float:
        """The share of prompt tokens that lately no cache had, 0 to 1; 1 before the first."""
        prompt, computed = self._recent
        return min(1.0, computed / prompt) if prompt else 1.0

    def stats(self) -> EngineStats:
        """Returns the present sums, without those by tenant."""
        sums = self._sums
        return EngineStats(
            num_deferred=self.num_deferred,
            num_preemptions=sums.num_preemptions,
            prompt_tokens=sums.prompt_tokens,
            local_cached_tokens=sums.local_cached_tokens,
            external_cached_tokens=sums.external_cached_tokens,
            generation_tokens=sums.generation_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            iteration_tokens=self._iteration_tokens,
            iteration_counts=list(self._iteration_counts),
            prefix_cache=self.prefix_cache,
            external_prefix_cache=self.external_prefix_cache,
            drafts=self.drafts,
            accepted_by_position=list(self.accepted_by_position),
        )
