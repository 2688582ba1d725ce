"""Computes a paced engine's steps and their times.

Owns slots, the order of prompts, and the timetable. Pure: the time is an argument, in seconds of
one monotonic clock; no I/O, no chance.

The step-time model. A request gets a slot, waits `ttft_s`, and is ready. One step computes the next
token of every running request and, with what is left of `max_num_batched_tokens`, chunks of the
prompts that are ready, in order of arrival; of each no more than `long_prefill_token_threshold`, as
long as there are others. It takes

    time_per_token_s + tpot_per_seq_s * tokens emitted + prompt tokens / prefill_tokens_per_s

and a request's first token comes with the step that computes the last chunk of its prompt. Without
`prefill_tokens_per_s` prompts are in no step: a request that is ready joins the one under way and
makes it no longer, and where there is none its first token comes at once.

At `r` requests per second with on average `i` prompt and `o` output tokens, all of them admitted,
an engine that is never idle admits r * s requests per step of `s` seconds. So in each step it emits
r * s * o tokens and computes r * s * i tokens of prompts. Put into the formula, that gives

    s = time_per_token_s / (1 - r * (o * tpot_per_seq_s + i / prefill_tokens_per_s))

and the engine is beyond its capacity where the bracket is not positive, or where s * r * o requests
do not fit into `max_num_seqs`, or s * r * (o + i) tokens into `max_num_batched_tokens`.

With `kv_cache_tokens` the engine has a KV cache of so many tokens (`paced.kv_cache`). Prompt tokens
that are in it are not computed again, so `i` above are those that are not. A request has its slot
then once it begins, `ttft_s` after it came, and that is once all of it has room. A running request
that finds none for its next token takes it from the one that began last: that one loses all it has
computed, and stands first among those that have not begun.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import dropwhile

from serving.domain.tokens.paced import seeded_token
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.kv_cache import CachedSequence, KvCache
from serving.link.messages import Finish, TokenOutput

# How far behind its timetable the engine catches up in a burst; beyond it, the timetable moves.
MAX_LAG_S = 0.1

# uvloop rounds timers to whole milliseconds: what is due within one is due now, or we would spin.
EARLY_S = 0.001


@dataclass(slots=True)
class PacedSequence:
    """The state of a request in the engine.

    `position` is that of its next output token; `stop_position` is `None` for a pooling request.
    `prompt_left` counts the tokens to compute before that one. `ready_at_s` is the earliest instant
    for a step to do so, known once the request has a slot. `cached` is `None` in an engine without
    a cache.
    """

    request_id: str
    seed: int
    position: int
    stop_position: int | None
    prompt_left: int
    is_poisoned: bool
    ready_at_s: float = 0.0
    cached: CachedSequence | None = None


class PacedBatch:
    """The requests of one engine and the step under way."""

    def __init__(
        self,
        config: PacedConfig,
        on_slot: Callable[[str, float], None] = lambda *_: None,
        adapters: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Makes an empty batch; calls `on_slot` with each request that gets a slot, and when.

        `adapters` are the names of the engine's, and where they are.
        """
        self._config = config
        self._on_slot = on_slot
        # Without a slot, in order of arrival; those that continue come before those that begin.
        self._returning: dict[str, PacedSequence] = {}
        self._waiting: dict[str, PacedSequence] = {}
        self._admitted: dict[str, PacedSequence] = {}  # not ready, in order of `ready_at_s`
        self._prompts: dict[str, PacedSequence] = {}  # ready to begin, in that order
        # Begun, in that order: those with `prompt_left` too, of which steps have computed some.
        self._running: dict[str, PacedSequence] = {}
        self._chunks: dict[str, int] = {}  # prompt tokens in the step under way, by request
        self._left_out: set[str] = set()  # running, and the step under way has no token for them
        # The end of the step under way; of an idle engine the earliest start of its next one.
        self._step_at_s = 0.0
        self._cache: KvCache | None = None
        if config.kv_cache_tokens is not None:
            self._cache = KvCache(config.kv_cache_tokens, config.block_size, adapters)
        self.num_preemptions = 0
        self.poisoned_by: str | None = None  # the poisoned request that got a slot

    def __contains__(self, request_id: str) -> bool:
        """Returns whether this request is here, with or without a slot."""
        return any(request_id in held for held in self._everyone)

    @property
    def num_admitted(self) -> int:
        """The number of requests that have a slot."""
        if self._cache is not None:
            return len(self._running)
        return len(self._admitted) + len(self._prompts) + len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return sum(map(len, self._everyone)) - self.num_admitted

    def backlog_tokens(self, computed_ratio: float) -> int:
        """Returns the tokens of prompts that are in no step yet; 0 if prompts cost nothing.

        Of those that have not begun, the cache has the rest of `computed_ratio`.
        """
        if self._config.prefill_tokens_per_s is None:
            return 0
        begun = sum(each.prompt_left for each in self._running.values())
        others = sum(
            each.prompt_left
            for held in (self._returning, self._waiting, self._admitted, self._prompts)
            for each in held.values()
        )
        return begun - sum(self._chunks.values()) + round(others * computed_ratio)

    @property
    def due_at_s(self) -> float | None:
        """The instant at which `step` has work; `None` while only an outside change can help."""
        if self._is_stepping:
            return self._step_at_s
        return next((each.ready_at_s for each in self._admitted.values()), None)

    @property
    def cache(self) -> KvCache | None:
        """The KV cache; `None` if it has none."""
        return self._cache

    def add(self, sequence: PacedSequence, now_s: float) -> None:
        """Takes a request in; it gets a slot at once if one is free."""
        queue = self._returning if sequence.position else self._waiting
        queue[sequence.request_id] = sequence
        self._fill_slots(now_s)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forgets these; unknown ones are ignored. The step under way takes no less time."""
        for request_id in request_ids:
            self._chunks.pop(request_id, None)
            for held in self._everyone:
                sequence = held.pop(request_id, None)
                if sequence is not None:
                    self._release(sequence)

    def clear(self) -> None:
        """Forgets all."""
        self.remove([request_id for held in self._everyone for request_id in held])

    def step(self, now_s: float) -> list[TokenOutput]:
        """Returns the outputs of the step under way, if it is over; then the next one begins."""
        self._fill_slots(now_s)
        self._take_ready(now_s)
        if not self._is_stepping or self._step_at_s > now_s + EARLY_S:
            return []
        outputs = self._emit()
        if self._config.prefill_tokens_per_s is None:
            # Even when nothing runs on: tokens of an engine are never closer than a step.
            self._begin_step(self._step_at_s, now_s)
            self._fill_slots(now_s)
        else:
            self._fill_slots(now_s)
            self._queue_ready(now_s)
            if self._running or self._prompts:
                self._begin_step(self._step_at_s, now_s)
        return outputs

    @property
    def _everyone(self) -> tuple[dict[str, PacedSequence], ...]:
        return self._returning, self._waiting, self._admitted, self._prompts, self._running

    @property
    def _is_stepping(self) -> bool:
        return bool(self._running)

    def _fill_slots(self, now_s: float) -> None:
        while queue := self._returning or self._waiting:
            if self._cache is None and self.num_admitted >= self._config.max_num_seqs:
                return
            self._admit(queue.pop(next(iter(queue))), now_s)

    def _admit(self, sequence: PacedSequence, now_s: float) -> None:
        if sequence.is_poisoned:
            self.poisoned_by = sequence.request_id
            return
        sequence.ready_at_s = now_s + self._config.ttft_s
        self._admitted[sequence.request_id] = sequence
        if self._cache is None:
            self._on_slot(sequence.request_id, now_s)

    def _take_ready(self, now_s: float) -> None:
        """Lets requests that are ready join the steps; an idle engine begins one with them."""
        if self._config.prefill_tokens_per_s is not None:
            self._queue_ready(now_s)
            if self._prompts and not self._is_stepping:
                first = next(iter(self._prompts.values()))
                self._begin_step(max(self._step_at_s, first.ready_at_s), now_s)
            return
        for sequence in self._pop_ready(now_s):
            if not self._running:
                self._step_at_s = max(self._step_at_s, sequence.ready_at_s)
            sequence.prompt_left = 0  # it costs nothing
            self._running[sequence.request_id] = sequence

    def _queue_ready(self, now_s: float) -> None:
        for sequence in self._pop_ready(now_s):
            if not sequence.position:
                self._prompts[sequence.request_id] = sequence
                continue
            # One that goes on stands before the first that has nothing yet.
            behind = list(dropwhile(lambda each: each.position, self._prompts.values()))
            for each in behind:
                del self._prompts[each.request_id]
            for each in (sequence, *behind):
                self._prompts[each.request_id] = each

    def _pop_ready(self, now_s: float) -> Iterable[PacedSequence]:
        while self._admitted:
            sequence = next(iter(self._admitted.values()))
            if sequence.ready_at_s > now_s + EARLY_S:
                return
            yield self._admitted.pop(sequence.request_id)

    def _begin_step(self, start_s: float, now_s: float) -> None:
        """Decides what the step that starts at `start_s` computes, and with that its end."""
        config = self._config
        if config.prefill_tokens_per_s is None:
            num_emitted, prompts_s = len(self._running), 0.0
        else:
            self._fill_step(now_s)
            is_last = (
                sequence.prompt_left == self._chunks.get(request_id, 0)
                for request_id, sequence in self._running.items()
            )
            num_emitted = sum(is_last) - len(self._left_out)
            prompts_s = sum(self._chunks.values()) / config.prefill_tokens_per_s
        duration_s = config.time_per_token_s + config.tpot_per_seq_s * num_emitted + prompts_s
        self._step_at_s = start_s + duration_s
        if self._step_at_s < now_s - MAX_LAG_S:
            self._step_at_s = now_s + duration_s

    def _fill_step(self, now_s: float) -> None:
        """Divides the tokens of the next step: first those that are begun, in their order."""
        self._left_out.clear()
        left, most = self._config.max_num_batched_tokens, self._most_of_one
        num_before = self.num_preemptions
        for sequence in list(self._running.values()):
            if sequence.request_id in self._running:
                left -= self._go_on(sequence, min(left, most))
        # What was taken from others was needed by those that go on.
        if self.num_preemptions == num_before:
            self._begin_prompts(left, most, now_s)

    @property
    def _most_of_one(self) -> int:
        """The tokens that a step computes at most of one prompt."""
        config = self._config
        num_requests = sum(map(len, self._everyone))
        if not config.long_prefill_token_threshold or num_requests < 2:
            return config.max_num_batched_tokens
        if not config.long_prefill_token_threshold_adaptive:
            return config.long_prefill_token_threshold
        share = config.max_num_batched_tokens // num_requests
        return max(config.long_prefill_token_threshold, share)

    def _go_on(self, sequence: PacedSequence, most: int) -> int:
        """Has the next step compute of one that is begun; returns how many tokens at most."""
        is_prompt = bool(sequence.prompt_left)
        num_new = min(most, sequence.prompt_left) if is_prompt else min(most, 1)
        if num_new and not self._has_room(sequence, num_new):
            return 0
        if is_prompt:
            if num_new:
                self._chunks[sequence.request_id] = num_new
        elif not num_new:
            self._left_out.add(sequence.request_id)
        return num_new

    def _begin_prompts(self, left: int, most: int, now_s: float) -> None:
        """Has the next step compute `left` tokens of those that have not begun."""
        for sequence in list(self._prompts.values()):
            chunk = self._first_chunk(sequence, min(left, most))
            if not chunk:
                break
            if self._cache is not None:
                self._on_slot(sequence.request_id, now_s)
            self._running[sequence.request_id] = self._prompts.pop(sequence.request_id)
            self._chunks[sequence.request_id] = chunk
            left -= chunk

    def _first_chunk(self, sequence: PacedSequence, most: int) -> int:
        """Returns how many tokens the next step computes of a prompt; 0 if it has to wait."""
        if most <= 0:
            return 0
        cached = sequence.cached
        if self._cache is None or cached is None:
            return min(most, sequence.prompt_left)
        if self.num_admitted >= self._config.max_num_seqs:
            return 0
        looks = sequence.stop_position is not None
        num_new = self._cache.begin(cached, most, looks=looks)
        if num_new is None:
            return 0
        sequence.prompt_left = num_new + cached.num_left
        return num_new

    def _has_room(self, sequence: PacedSequence, num_new: int) -> bool:
        """Gives one that is begun room for its next tokens, at the cost of those that began last.

        Returns `False` if it was the last one itself.
        """
        cached = sequence.cached
        if self._cache is None or cached is None:
            return True
        while not self._cache.go_on(cached, num_new):
            last = next(reversed(self._running.values()))
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: PacedSequence) -> None:
        """Takes from a request all that it has computed; it begins again before others begin."""
        del self._running[sequence.request_id]
        self._prompts = {sequence.request_id: sequence, **self._prompts}
        self._release(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: PacedSequence) -> None:
        cached = sequence.cached
        if self._cache is not None and cached is not None:
            self._cache.release(cached)
            sequence.prompt_left = cached.num_left

    def _emit(self) -> list[TokenOutput]:
        """Returns one token for each running request and each whose prompt is now computed."""
        for request_id, chunk in self._chunks.items():
            self._running[request_id].prompt_left -= chunk
        self._chunks.clear()
        outputs: list[TokenOutput] = []
        finished: list[str] = []
        for sequence in self._running.values():
            if sequence.prompt_left or sequence.request_id in self._left_out:
                continue
            position, stop_position = sequence.position, sequence.stop_position
            if stop_position is None:
                finished.append(sequence.request_id)
                outputs.append(TokenOutput(sequence.request_id, [], int(Finish.STOP)))
                continue
            token_id = seeded_token(sequence.seed, position, self._config.token_range)
            sequence.position = position + 1
            output = TokenOutput(sequence.request_id, [token_id])
            cached = sequence.cached
            if cached is not None:
                cached.token_ids.append(token_id)
                output.num_cached, cached.num_found = cached.num_found, None
            if position + 1 >= stop_position:
                finished.append(sequence.request_id)
                output.finish = int(Finish.LENGTH)
            outputs.append(output)
        for request_id in finished:
            self._release(self._running.pop(request_id))
        return outputs
