"""Computes a paced engine's steps and their times.

Owns slots, the order of prompts, and the timetable. Pure: the time is an argument, in seconds of
one monotonic clock; no I/O, no chance.

The step-time model. A request gets a slot, waits `ttft_s`, and is ready. One step computes the next
token of every running request and, with what is left of `max_num_batched_tokens`, chunks of the
prompts that are ready, in order of arrival. It takes

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
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serving.domain.paced_tokens import LETTERS, seeded_token
from serving.link.messages import Finish, TokenOutput

# How far behind its timetable the engine catches up in a burst; beyond it, the timetable moves.
MAX_LAG_S = 0.1

# uvloop rounds timers to whole milliseconds: what is due within one is due now, or we would spin.
EARLY_S = 0.001


@dataclass(frozen=True, slots=True)
class PacedConfig:
    """The timetable and the limits of a paced engine.

    A pace of 0 is as fast as the event loop turns. Tokens lie in `token_range`, its end excluded.
    `prefill_tokens_per_s` is `None` if prompts cost nothing beyond `ttft_s`;
    `max_num_batched_tokens` bounds a step only if they do. `model_seed` selects the model it plays.
    """

    ttft_s: float = 0.0
    time_per_token_s: float = 0.0
    max_num_seqs: int = 256
    max_model_len: int = 4096
    vocab_size: int = 256
    token_range: tuple[int, int] = LETTERS
    prefill_tokens_per_s: float | None = None
    tpot_per_seq_s: float = 0.0
    max_num_batched_tokens: int = 8192
    model_seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.token_range
        if not 0 <= low < high <= self.vocab_size:
            msg = f"token_range={self.token_range} is not within 0..vocab_size={self.vocab_size}"
            raise ValueError(msg)
        if min(self.ttft_s, self.time_per_token_s, self.tpot_per_seq_s) < 0:
            msg = f"ttft_s={self.ttft_s}, time_per_token_s={self.time_per_token_s} and"
            msg += f" tpot_per_seq_s={self.tpot_per_seq_s} must be >= 0"
            raise ValueError(msg)
        if self.max_num_seqs < 1 or self.max_model_len < 2:
            msg = f"max_num_seqs={self.max_num_seqs} must be >= 1"
            msg += f", max_model_len={self.max_model_len} must be >= 2"
            raise ValueError(msg)
        if self.prefill_tokens_per_s is None:
            return
        if self.prefill_tokens_per_s <= 0:
            msg = f"prefill_tokens_per_s={self.prefill_tokens_per_s} must be > 0 or None"
            raise ValueError(msg)
        # Fewer, and full slots would leave a prompt without a single token of any step.
        if self.max_num_batched_tokens < self.max_num_seqs:
            msg = f"max_num_batched_tokens={self.max_num_batched_tokens} must be >="
            msg += f" max_num_seqs={self.max_num_seqs}"
            raise ValueError(msg)


@dataclass(slots=True)
class PacedSequence:
    """The state of a request in the engine.

    `position` is that of its next output token; `stop_position` is `None` for a pooling request.
    `prompt_left` counts the tokens to compute before that one. `ready_at_s` is the earliest instant
    for a step to do so, known once the request has a slot.
    """

    request_id: str
    seed: int
    position: int
    stop_position: int | None
    prompt_left: int
    is_poisoned: bool
    ready_at_s: float = 0.0


class PacedBatch:
    """The requests of one engine and the step under way."""

    def __init__(
        self, config: PacedConfig, on_slot: Callable[[str, float], None] = lambda *_: None
    ) -> None:
        """Makes an empty batch; calls `on_slot` with each request that gets a slot, and when."""
        self._config = config
        self._on_slot = on_slot
        # Without a slot, in order of arrival; those that continue come before those that begin.
        self._returning: dict[str, PacedSequence] = {}
        self._waiting: dict[str, PacedSequence] = {}
        self._admitted: dict[str, PacedSequence] = {}  # not ready, in order of `ready_at_s`
        self._prompts: dict[str, PacedSequence] = {}  # ready, with `prompt_left`, in that order
        self._running: dict[str, PacedSequence] = {}
        self._chunks: dict[str, int] = {}  # prompt tokens in the step under way, by request
        # The end of the step under way; of an idle engine the earliest start of its next one.
        self._step_at_s = 0.0
        self.poisoned_by: str | None = None  # the poisoned request that got a slot

    def __contains__(self, request_id: str) -> bool:
        """Returns whether this request is here, with or without a slot."""
        return any(request_id in held for held in self._everyone)

    @property
    def num_admitted(self) -> int:
        """The number of requests that have a slot."""
        return len(self._admitted) + len(self._prompts) + len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._returning) + len(self._waiting)

    @property
    def due_at_s(self) -> float | None:
        """The instant at which `step` has work; `None` while only an outside change can help."""
        if self._is_stepping:
            return self._step_at_s
        return next((each.ready_at_s for each in self._admitted.values()), None)

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
                held.pop(request_id, None)

    def clear(self) -> None:
        """Forgets all."""
        self._chunks.clear()
        for held in self._everyone:
            held.clear()

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
        return bool(self._running or self._chunks)

    def _fill_slots(self, now_s: float) -> None:
        while self.num_waiting and self.num_admitted < self._config.max_num_seqs:
            queue = self._returning or self._waiting
            self._admit(queue.pop(next(iter(queue))), now_s)

    def _admit(self, sequence: PacedSequence, now_s: float) -> None:
        if sequence.is_poisoned:
            self.poisoned_by = sequence.request_id
            return
        sequence.ready_at_s = now_s + self._config.ttft_s
        self._admitted[sequence.request_id] = sequence
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
            self._running[sequence.request_id] = sequence

    def _queue_ready(self, now_s: float) -> None:
        for sequence in self._pop_ready(now_s):
            self._prompts[sequence.request_id] = sequence

    def _pop_ready(self, now_s: float) -> Iterable[PacedSequence]:
        while self._admitted:
            sequence = next(iter(self._admitted.values()))
            if sequence.ready_at_s > now_s + EARLY_S:
                return
            yield self._admitted.pop(sequence.request_id)

    def _begin_step(self, start_s: float, now_s: float) -> None:
        """Decides what the step that starts at `start_s` computes, and with that its end."""
        config = self._config
        left = config.max_num_batched_tokens - len(self._running)
        num_emitted = len(self._running)
        for sequence in self._prompts.values():
            if left <= 0:
                break
            chunk = min(left, sequence.prompt_left)
            self._chunks[sequence.request_id] = chunk
            left -= chunk
            num_emitted += chunk == sequence.prompt_left
        duration_s = config.time_per_token_s + config.tpot_per_seq_s * num_emitted
        if config.prefill_tokens_per_s is not None:
            duration_s += sum(self._chunks.values()) / config.prefill_tokens_per_s
        self._step_at_s = start_s + duration_s
        if self._step_at_s < now_s - MAX_LAG_S:
            self._step_at_s = now_s + duration_s

    def _emit(self) -> list[TokenOutput]:
        """Returns one token for each running request and each whose prompt is now computed."""
        for request_id, chunk in self._chunks.items():
            sequence = self._prompts[request_id]
            sequence.prompt_left -= chunk
            if not sequence.prompt_left:
                self._running[request_id] = self._prompts.pop(request_id)
        self._chunks.clear()
        outputs: list[TokenOutput] = []
        finished: list[str] = []
        for sequence in self._running.values():
            position, stop_position = sequence.position, sequence.stop_position
            if stop_position is None:
                finished.append(sequence.request_id)
                outputs.append(TokenOutput(sequence.request_id, [], int(Finish.STOP)))
                continue
            token_id = seeded_token(sequence.seed, position, self._config.token_range)
            sequence.position = position + 1
            if position + 1 < stop_position:
                outputs.append(TokenOutput(sequence.request_id, [token_id]))
            else:
                finished.append(sequence.request_id)
                outputs.append(TokenOutput(sequence.request_id, [token_id], int(Finish.LENGTH)))
        for request_id in finished:
            del self._running[request_id]
        return outputs
