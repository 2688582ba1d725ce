"""A deterministic engine that emits tokens on a timetable: for tests, and to measure all the rest.

Every token is a pure function of the prompt and its position, so what a request must answer is
known beforehand, whole or resumed. Owns pacing, slots and failures on command. Steps are shared:
one step adds one token to every running request, as in a real engine. It turns only while
`next_step` is awaited, and reads the event loop's clock, nothing else.
"""

import asyncio
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from serving.engine.protocol import EngineDiedError
from serving.link.messages import EngineLoad, Finish, TokenOutput, TokenRequest

# How far behind its timetable the engine catches up in a burst; beyond it, the timetable moves.
MAX_LAG_S = 0.1

# uvloop rounds timers to whole milliseconds: what is due within one is due now, or we would spin.
EARLY_S = 0.001


@dataclass(frozen=True, slots=True)
class PacedConfig:
    """The timetable and the limits of a paced engine.

    A pace of 0 is as fast as the event loop turns. Tokens lie in `token_range`, its end excluded.
    """

    ttft_s: float = 0.0
    time_per_token_s: float = 0.0
    max_num_seqs: int = 256
    max_model_len: int = 4096
    vocab_size: int = 256
    token_range: tuple[int, int] = (97, 123)  # "a" to "z" of a byte-level tokenizer

    def __post_init__(self) -> None:
        low, high = self.token_range
        if not 0 <= low < high <= self.vocab_size:
            msg = f"token_range={self.token_range} is not within 0..vocab_size={self.vocab_size}"
            raise ValueError(msg)
        if min(self.ttft_s, self.time_per_token_s) < 0:
            msg = f"ttft_s={self.ttft_s} and time_per_token_s={self.time_per_token_s} must be >= 0"
            raise ValueError(msg)
        if self.max_num_seqs < 1 or self.max_model_len < 2:
            msg = f"max_num_seqs={self.max_num_seqs} must be >= 1"
            msg += f", max_model_len={self.max_model_len} must be >= 2"
            raise ValueError(msg)


def paced_token(
    prompt_token_ids: Sequence[int], position: int, token_range: tuple[int, int]
) -> int:
    """The token at output `position` (0 is the first) for this prompt."""
    return _token_at(_seed_of(prompt_token_ids), position, *token_range)


def _seed_of(prompt_token_ids: Sequence[int]) -> int:
    return zlib.crc32(array("q", prompt_token_ids).tobytes())


def _token_at(seed: int, position: int, low: int, high: int) -> int:
    # Two odd 32-bit multipliers; the upper bits are the mixed ones.
    mixed = ((seed ^ (position * 0x9E3779B1)) * 0x85EBCA6B) & 0xFFFFFFFF
    return low + (mixed >> 8) % (high - low)


@dataclass(slots=True)
class _Sequence:
    """A request in the engine. `ready_at_s` is the instant of its first token, once admitted."""

    request_id: str
    seed: int
    position: int
    stop_position: int | None  # None for a pooling request
    is_poisoned: bool
    ready_at_s: float = 0.0


@dataclass(slots=True)
class _Faults:
    """What was injected and has not yet struck."""

    submit_reason: str | None = None
    poison_token_ids: set[int] = field(default_factory=set)
    stall: asyncio.TimerHandle | None = None


class PacedEngine:
    """An `Engine` whose every output is known beforehand. Fails on command.

    `calls` are the operations that `call` knows, by name.
    """

    def __init__(
        self,
        config: PacedConfig,
        calls: Mapping[str, Callable[[bytes], bytes]] | None = None,
    ) -> None:
        self._config = config
        self._calls = dict(calls or {})
        self._waiting: dict[str, _Sequence] = {}  # without a slot, in order of arrival
        self._prefilling: dict[str, _Sequence] = {}  # with a slot, in order of `ready_at_s`
        self._running: dict[str, _Sequence] = {}
        self._step_at_s = 0.0  # the next token's instant, while anything runs
        self._changed = asyncio.Event()
        self._turning = asyncio.Event()
        self._turning.set()
        self._death_reason: str | None = None
        self._faults = _Faults()

    async def submit(self, request: TokenRequest) -> None:
        """Takes one request and admits it at once when a slot is free."""
        self._raise_if_dead()
        sequence = self._validated(request)
        if self._num_admitted < self._config.max_num_seqs and not self._waiting:
            self._admit(sequence, asyncio.get_running_loop().time())
        else:
            self._waiting[sequence.request_id] = sequence
        self._changed.set()

    async def abort(self, request_ids: list[str]) -> None:
        """Forgets these sequences; their slots are free at the next step."""
        for request_id in request_ids:
            for sequences in (self._waiting, self._prefilling, self._running):
                sequences.pop(request_id, None)
        self._changed.set()

    async def next_step(self) -> list[TokenOutput]:
        """Waits for the next instant of the timetable at which some request gains a token."""
        loop = asyncio.get_running_loop()
        while True:
            await self._turning.wait()
            self._raise_if_dead()
            self._changed.clear()
            outputs = self._step(loop.time())
            self._raise_if_dead()
            if outputs:
                # Without a pace there is nothing to wait for, and the event loop must still turn.
                await asyncio.sleep(0)
                return outputs
            await self._wait_for_change(loop)

    async def call(self, method: str, args: bytes) -> bytes:
        """Runs one of the operations given at construction."""
        self._raise_if_dead()
        if method not in self._calls:
            msg = f"no call {method!r}, only {sorted(self._calls)}"
            raise ValueError(msg)
        return self._calls[method](args)

    async def check(self, timeout_s: float) -> None:
        """Passes while the loop turns; waits for one that hangs or stalls."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._turning.wait()
        except TimeoutError as error:
            msg = f"engine loop has not turned for {timeout_s} s"
            raise EngineDiedError(msg) from error
        self._raise_if_dead()

    @property
    def load(self) -> EngineLoad:
        """Slots in use; the cache counts as used by slots, all alike."""
        running = self._num_admitted
        return EngineLoad(running, len(self._waiting), running / self._config.max_num_seqs)

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
        """Ends it; whoever awaits a step is told. Idempotent."""
        self.die("engine closed")

    def die(self, reason: str) -> None:
        """From now on everything raises `EngineDiedError(reason)`; the first reason stays."""
        if self._death_reason is None:
            self._death_reason = reason
        for sequences in (self._waiting, self._prefilling, self._running):
            sequences.clear()
        self.unhang()
        self._changed.set()

    def hang(self) -> None:
        """The loop stops turning: no step comes and `check` fails, until `unhang`."""
        self._turning.clear()
        self._changed.set()

    def unhang(self) -> None:
        """The loop turns again; ends a stall too."""
        if self._faults.stall is not None:
            self._faults.stall.cancel()
            self._faults.stall = None
        self._turning.set()

    def stall_for(self, duration_s: float) -> None:
        """The loop stops turning for a while, then goes on."""
        self.unhang()
        self.hang()
        loop = asyncio.get_running_loop()
        self._faults.stall = loop.call_later(duration_s, self.unhang)

    def poison(self, token_id: int) -> None:
        """A request whose prompt holds this token kills the engine when it gets a slot."""
        self._faults.poison_token_ids.add(token_id)

    def fail_submit(self, reason: str) -> None:
        """The next request is refused with `ValueError(reason)`."""
        self._faults.submit_reason = reason

    @property
    def _num_admitted(self) -> int:
        return len(self._prefilling) + len(self._running)

    def _raise_if_dead(self) -> None:
        if self._death_reason is not None:
            raise EngineDiedError(self._death_reason)

    def _validated(self, request: TokenRequest) -> _Sequence:
        """The request as a sequence. Raises `ValueError` for one that no engine could serve."""
        if self._faults.submit_reason is not None:
            reason, self._faults.submit_reason = self._faults.submit_reason, None
            raise ValueError(reason)
        prompt, emitted = request.prompt_token_ids, len(request.emitted_token_ids)
        if not prompt:
            msg = "empty prompt"
            raise ValueError(msg)
        if min(prompt) < 0 or max(prompt) >= self._config.vocab_size:
            msg = f"prompt token ids must lie within 0..{self._config.vocab_size - 1}"
            raise ValueError(msg)
        # The same bound for prompt and output together as vLLM's `max_model_len`.
        room = self._config.max_model_len - len(prompt)
        if room < 1:
            msg = f"prompt of {len(prompt)} tokens, max_model_len is {self._config.max_model_len}"
            raise ValueError(msg)
        request_id = request.request_id
        if any(request_id in held for held in (self._waiting, self._prefilling, self._running)):
            msg = f"request {request_id} is already here"
            raise ValueError(msg)
        stop_position = None if request.max_tokens is None else min(request.max_tokens, room)
        if stop_position is not None and emitted >= stop_position:
            msg = f"{emitted} tokens already emitted, at most {stop_position} are allowed"
            raise ValueError(msg)
        is_poisoned = not self._faults.poison_token_ids.isdisjoint(prompt)
        return _Sequence(request_id, _seed_of(prompt), emitted, stop_position, is_poisoned)

    def _admit(self, sequence: _Sequence, now_s: float) -> None:
        if sequence.is_poisoned:
            self.die(f"poisoned by request {sequence.request_id}")
            return
        sequence.ready_at_s = now_s + self._config.ttft_s
        self._prefilling[sequence.request_id] = sequence

    def _step(self, now_s: float) -> list[TokenOutput]:
        """Emits one token per running request if it is time, and fills freed slots."""
        self._fill_slots(now_s)
        outputs: list[TokenOutput] = []
        if self._start_ready(now_s) and self._step_at_s <= now_s + EARLY_S:
            outputs = self._emit()
            self._step_at_s += self._config.time_per_token_s
            if self._step_at_s < now_s - MAX_LAG_S:
                self._step_at_s = now_s + self._config.time_per_token_s
            self._fill_slots(now_s)
        return outputs

    def _fill_slots(self, now_s: float) -> None:
        while self._waiting and self._num_admitted < self._config.max_num_seqs:
            self._admit(self._waiting.pop(next(iter(self._waiting))), now_s)

    def _start_ready(self, now_s: float) -> bool:
        """Lets requests whose first token is due join the steps. Whether anything runs then."""
        while self._prefilling:
            sequence = next(iter(self._prefilling.values()))
            if sequence.ready_at_s > now_s + EARLY_S:
                break
            if not self._running:
                self._step_at_s = max(self._step_at_s, sequence.ready_at_s)
            self._running[sequence.request_id] = self._prefilling.pop(sequence.request_id)
        return bool(self._running)

    def _emit(self) -> list[TokenOutput]:
        low, high = self._config.token_range
        outputs: list[TokenOutput] = []
        finished: list[str] = []
        for sequence in self._running.values():
            position, stop_position = sequence.position, sequence.stop_position
            if stop_position is None:
                finished.append(sequence.request_id)
                outputs.append(TokenOutput(sequence.request_id, [], int(Finish.STOP)))
                continue
            token_id = _token_at(sequence.seed, position, low, high)
            sequence.position = position + 1
            if position + 1 < stop_position:
                outputs.append(TokenOutput(sequence.request_id, [token_id]))
            else:
                finished.append(sequence.request_id)
                outputs.append(TokenOutput(sequence.request_id, [token_id], int(Finish.LENGTH)))
        for request_id in finished:
            del self._running[request_id]
        return outputs

    async def _wait_for_change(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for the next instant of the timetable, or for a submit, an abort or a failure."""
        due_at_s: float | None = None
        if self._running:
            due_at_s = self._step_at_s
        elif self._prefilling:
            due_at_s = next(iter(self._prefilling.values())).ready_at_s
        timer = None if due_at_s is None else loop.call_at(due_at_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
