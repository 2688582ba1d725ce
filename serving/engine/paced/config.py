"""The timetable, the limits and the cache of a paced engine. Values only."""

from dataclasses import dataclass

from serving.domain.tokens.paced import LETTERS


@dataclass(frozen=True, slots=True)
class PacedConfig:
    """The timetable and the limits of a paced engine.

    A pace of 0 is as fast as the event loop turns. Tokens lie in `token_range`, its end excluded.
    `prefill_tokens_per_s` is `None` if prompts cost nothing beyond `ttft_s`;
    `max_num_batched_tokens` bounds a step only if they do, and `long_prefill_token_threshold` what
    of one prompt is in it while there are others: 0 bounds nothing, and with
    `long_prefill_token_threshold_adaptive` it is at least one's share of the step. `model_seed`
    selects the model it plays. `kv_cache_tokens` is `None` for an engine that never runs out of
    room, and finds nothing.
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
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    model_seed: int = 0
    kv_cache_tokens: int | None = None
    block_size: int = 16

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
        self._check_cache()
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
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            msg = f"long_prefill_token_threshold={self.long_prefill_token_threshold} is not within"
            msg += f" 0..max_model_len={self.max_model_len}"
            raise ValueError(msg)

    def _check_cache(self) -> None:
        if self.kv_cache_tokens is None:
            return
        if self.prefill_tokens_per_s is None:
            msg = f"kv_cache_tokens={self.kv_cache_tokens} needs prefill_tokens_per_s:"
            msg += " prompts that cost nothing have nothing to find"
            raise ValueError(msg)
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be >= 1")
        # Fewer, and a single sequence would never end.
        num_blocks = self.kv_cache_tokens // self.block_size
        if num_blocks * self.block_size < self.max_model_len:
            msg = f"kv_cache_tokens={self.kv_cache_tokens} in blocks of {self.block_size} must"
            msg += f" have room for max_model_len={self.max_model_len}"
            raise ValueError(msg)
