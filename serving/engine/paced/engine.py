"""Emits tokens on a timetable, as a deterministic engine: for tests, and to measure all the rest.

Every token is a pure function of the prompt and its position (`serving.domain.tokens.paced`), so
the answer of a request is known beforehand, whole or resumed. Owns the life of an engine and its
failures on command. Does not own slots and timetable (`paced.batch`). The engine runs only while
`next_step` is awaited, and reads the event loop's clock, nothing else.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from serving.domain.tokens.block_hashes import NO_CONTEXT
from serving.domain.tokens.cached_blocks import CacheMirror
from serving.domain.tokens.paced import prompt_seed, seeded_token
from serving.engine.paced.batch import PacedBatch, PacedSequence
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.kv_cache import CachedSequence
from serving.engine.stats import StatsCollector, StepCount
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import EngineEnd, EngineLoad, EngineStats, TokenOutput, TokenRequest
from serving.link.rooms.room import EngineCapacity


@dataclass(slots=True)
class _Faults:
    submit_reason: str | None = None
    poison_token_ids: set[int] = field(default_factory=set)
    stall: asyncio.TimerHandle | None = None


class PacedEngine:
    """Implements an `Engine` with outputs that are known beforehand. Fails on command."""

    def __init__(
        self,
        config: PacedConfig,
        calls: Mapping[str, Callable[[bytes], bytes]] | None = None,
        adapters: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Makes an engine that has `adapters`, by name and path; they change no token."""
        self.on_scheduled: Callable[[str, float], None] | None = None
        self._config = config
        self._calls = dict(calls or {})
        self._adapters = frozenset(name for name, _ in adapters)
        self._batch = PacedBatch(config, self._report_scheduled, adapters)
        self._changed = asyncio.Event()
        self._turning = asyncio.Event()
        self._turning.set()
        self._death_reason: str | None = None
        self._faults = _Faults()
        self._meter = StatsCollector()
        if self._batch.cache is not None:
            self._meter.prefix_cache = (0, 0)
        self._num_preemptions = 0  # of those that are counted
        self._backlog_tokens = 0  # after the latest step, whatever its cache may have of them
        self._prompt_tokens: dict[str, int] = {}  # of requests without a token yet, by id
        self._resumed: set[str] = set()  # of these, those that have emitted tokens elsewhere

    async def submit(self, request: TokenRequest) -> None:
        """Takes one request and admits it at once when a slot is free."""
        self._raise_if_dead()
        sequence = self._validated(request)
        self._prompt_tokens[request.request_id] = sequence.prompt_left
        if request.emitted_token_ids:
            self._resumed.add(request.request_id)
        self._batch.add(sequence, asyncio.get_running_loop().time())
        self._die_of_poison()
        self._changed.set()

    async def abort(self, request_ids: list[str]) -> None:
        """Forgets these sequences; their slots are free at the next step."""
        self._batch.remove(request_ids)
        for request_id in request_ids:
            self._prompt_tokens.pop(request_id, None)
            self._resumed.discard(request_id)
        self._changed.set()

    async def next_step(self) -> list[TokenOutput]:
        """Waits for the next instant of the timetable at which some request gains a token."""
        loop = asyncio.get_running_loop()
        while True:
            await self._turning.wait()
            self._raise_if_dead()
            self._changed.clear()
            outputs = self._batch.step(loop.time())
            self._die_of_poison()
            self._raise_if_dead()
            before, self._backlog_tokens = self._backlog_tokens, self._batch.backlog_tokens(1.0)
            if not outputs and self._backlog_tokens < before:
                return outputs
            if outputs:
                self._count(outputs, loop.time())
                # Without a pace there is nothing to wait for, and the event loop must still turn.
                await asyncio.sleep(0)
                return outputs
            await self._wait_for_change(loop)

    async def call(self, method: str, args: bytes) -> bytes:
        """Runs one of the operations given at construction, by name; it can reset its cache."""
        self._raise_if_dead()
        if method == "reset_prefix_cache" and self._batch.cache is not None:
            return msgspec.msgpack.encode(self._batch.cache.forget_all())
        if method not in self._calls:
            raise ValueError(f"no call {method!r}, only {sorted(self._calls)}")
        return self._calls[method](args)

    async def check(self, timeout_s: float) -> None:
        """Checks that the loop turns; raises `EngineDiedError` if it hangs for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._turning.wait()
        except TimeoutError as error:
            reason = f"engine loop has not turned for {timeout_s} s"
            raise EngineDiedError(reason, EngineEnd.HUNG) from error
        self._raise_if_dead()

    def busy_s(self) -> None:
        """Returns `None`: it computes nothing, and stands still only when it is told to."""
        return

    def compiling(self, since_s: float) -> None:  # noqa: ARG002 # as the protocol names it
        """Returns `None`: it has no programs."""
        return

    @property
    def load(self) -> EngineLoad:
        """The slots in use, and the waiting requests.

        Without a cache each slot counts as an equal share of one.
        """
        running, cache = self._batch.num_admitted, self._batch.cache
        share = running / self._config.max_num_seqs if cache is None else cache.usage_ratio
        ratio = self._meter.computed_ratio
        backlog_tokens = self._batch.backlog_tokens(ratio)
        return EngineLoad(running, self._batch.num_waiting, share, backlog_tokens, ratio)

    @property
    def capacity(self) -> EngineCapacity:
        """The limits of the configuration."""
        config = self._config
        return EngineCapacity(
            config.max_num_seqs, config.max_num_batched_tokens, config.kv_cache_tokens
        )

    @property
    def cached(self) -> CacheMirror | None:
        """What its cache has; `None` without one."""
        return None if self._batch.cache is None else self._batch.cache.mirror

    @property
    def engine_stats(self) -> EngineStats:
        """The tokens and steps since the start. This engine drafts nothing."""
        return self._meter.stats()

    @property
    def info(self) -> dict[str, object]:
        """The limits of the configuration."""
        return {
            "engine": "paced",
            "max_model_len": self._config.max_model_len,
            "max_num_seqs": self._config.max_num_seqs,
            "vocab_size": self._config.vocab_size,
            "supported_tasks": ["generate"],
        }

    async def close(self) -> None:
        """Ends the engine; a caller that awaits a step gets an error. Idempotent."""
        self.die("engine closed")

    def die(self, reason: str) -> None:
        """Makes every call raise `EngineDiedError(reason)` from now on; the first reason stays."""
        if self._death_reason is None:
            self._death_reason = reason
        self._batch.clear()
        self._prompt_tokens.clear()
        self._resumed.clear()
        self.unhang()
        self._changed.set()

    def hang(self) -> None:
        """Stops the loop: no step comes and `check` fails, until `unhang`."""
        self._turning.clear()
        self._changed.set()

    def unhang(self) -> None:
        """Lets the loop turn again; ends a stall too."""
        if self._faults.stall is not None:
            self._faults.stall.cancel()
            self._faults.stall = None
        self._turning.set()

    def stall_for(self, duration_s: float) -> None:
        """Stops the loop for a while; then it goes on."""
        self.unhang()
        self.hang()
        loop = asyncio.get_running_loop()
        self._faults.stall = loop.call_later(duration_s, self.unhang)

    def poison(self, token_id: int) -> None:
        """Makes a request whose prompt holds this token kill the engine when it gets a slot."""
        self._faults.poison_token_ids.add(token_id)

    def fail_submit(self, reason: str) -> None:
        """Makes the next request fail with `ValueError(reason)`."""
        self._faults.submit_reason = reason

    def _count(self, outputs: list[TokenOutput], now_s: float) -> None:
        """Counts a step as vLLM does: of a resumed request its first engine has told the prompt."""
        step = StepCount(sum([len(output.token_ids) for output in outputs]))
        if self._prompt_tokens:
            for output in outputs:
                num_prompt = self._prompt_tokens.pop(output.request_id, 0)
                if output.num_cached is not None:
                    self._meter.looked_up(num_prompt, output.num_cached)
                if output.request_id in self._resumed:
                    self._resumed.discard(output.request_id)
                    output.num_cached = None
                    continue
                step.prompt_tokens += num_prompt
                step.local_cached_tokens += output.num_cached or 0
        step.computed_tokens = step.prompt_tokens - step.local_cached_tokens
        step.num_preemptions = self._batch.num_preemptions - self._num_preemptions
        self._num_preemptions = self._batch.num_preemptions
        self._meter.stepped(step, now_s, goes_on=self._batch.num_admitted > 0)

    def _report_scheduled(self, request_id: str, at_s: float) -> None:
        if self.on_scheduled is not None:
            self.on_scheduled(request_id, at_s)

    def _die_of_poison(self) -> None:
        if self._batch.poisoned_by is not None:
            self.die(f"poisoned by request {self._batch.poisoned_by}")

    def _raise_if_dead(self) -> None:
        if self._death_reason is not None:
            raise EngineDiedError(self._death_reason)

    def _validated(self, request: TokenRequest) -> PacedSequence:
        """Returns the request as a sequence. Raises `ValueError` if no engine could serve it."""
        if self._faults.submit_reason is not None:
            reason, self._faults.submit_reason = self._faults.submit_reason, None
            raise ValueError(reason)
        prompt, emitted = request.prompt_token_ids, len(request.emitted_token_ids)
        if not prompt:
            raise ValueError("empty prompt")
        if min(prompt) < 0 or max(prompt) >= self._config.vocab_size:
            raise ValueError(f"prompt token ids must lie within 0..{self._config.vocab_size - 1}")
        # The same bound for prompt and output together as vLLM's `max_model_len`.
        room = self._config.max_model_len - len(prompt)
        if room < 1:
            msg = f"prompt of {len(prompt)} tokens, max_model_len is {self._config.max_model_len}"
            raise ValueError(msg)
        request_id = request.request_id
        if request_id in self._batch:
            raise ValueError(f"request {request_id} is already here")
        stop_position = None if request.max_tokens is None else min(request.max_tokens, room)
        if stop_position is not None and emitted >= stop_position:
            msg = f"{emitted} tokens already emitted, at most {stop_position} are allowed"
            raise ValueError(msg)
        seed = prompt_seed(prompt, self._config.model_seed)
        self._raise_if_altered(request.emitted_token_ids, seed)
        is_poisoned = not self._faults.poison_token_ids.isdisjoint(prompt)
        context = request.block_context or NO_CONTEXT
        if context.adapter is not None and context.adapter not in self._adapters:
            raise ValueError(f"adapter {context.adapter!r} is not one of this engine's")
        # What was emitted before has to be computed anew, like the prompt.
        prompt_left = len(prompt) + emitted
        cached = None
        if self._batch.cache is not None:
            cached = CachedSequence([*prompt, *request.emitted_token_ids], context)
        return PacedSequence(
            *(request_id, seed, emitted, stop_position, prompt_left, is_poisoned), cached=cached
        )

    def _raise_if_altered(self, emitted_token_ids: list[int], seed: int) -> None:
        """Refuses a resume after tokens that no engine of this model has emitted.

        A real engine would go on from any given tokens. This one knows what was emitted, so
        that tokens lost, repeated or mixed up on the way show, even in the right number.
        """
        token_range = self._config.token_range
        for position, token_id in enumerate(emitted_token_ids):
            expected = seeded_token(seed, position, token_range)
            if token_id != expected:
                msg = f"emitted token {position} is {token_id}, this model emits {expected} there"
                raise ValueError(msg)

    async def _wait_for_change(self, loop: asyncio.AbstractEventLoop) -> None:
        due_at_s = self._batch.due_at_s
        timer = None if due_at_s is None else loop.call_at(due_at_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
