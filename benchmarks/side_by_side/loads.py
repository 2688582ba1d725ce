"""What is asked of every server: the loads, and who is compared with whom under which of them.

All of it goes into the record of a run, so that pairs of different work are never mixed.
"""

from collections.abc import Sequence

import msgspec

PROMPT_TOKENS = 64
# As slow as a slice that serves a large model.
TTFT_MS, TPOT_MS = 50.0, 20.0
ANSWER_TOKENS = 200
ANSWER_S = (TTFT_MS + (ANSWER_TOKENS - 1) * TPOT_MS) / 1e3
MAX_NUM_SEQS = 4096
# Of a comparison, unless it says another number.
NUM_PAIRS = 15
# "Carried" means that at least so much of the offered rate arrived.
MIN_SHARE = 0.95


class Load(msgspec.Struct, frozen=True):
    """Streams that begin at once. Each has its connection, open beforehand.

    A stream sends its next request when an answer ends, until `warmup_s` and `window_s` are over;
    what is counted is the window. Where `window_s` is 0 every stream sends one request, and all of
    it is counted. An answer has exactly `output_tokens`.
    """

    name: str
    streams: int
    output_tokens: int
    warmup_s: float = 0.0
    window_s: float = 0.0

    @property
    def is_burst(self) -> bool:
        """Whether every stream sends one request only."""
        return self.window_s == 0


class Comparison(msgspec.Struct, frozen=True):
    """Two systems and the loads that both are put under. `key` is what `--only` names.

    `warm_up` comes first and is not counted: requests to a server that has just started cost more.
    `num_pairs` is how many pairs make a result.
    """

    key: str
    ours: str
    theirs: str
    loads: tuple[Load, ...]
    warm_up: Load = Load("warm-up", 32, 16, window_s=3.0)
    num_pairs: int = NUM_PAIRS

    def is_of_the_same(self, other: "Comparison") -> bool:
        """Whether one start of our system serves both: it is the same, under the same loads."""
        mine, its = ((each.ours, each.loads, each.warm_up) for each in (self, other))
        return mine == its


def _steady(streams: int) -> Load:
    # One answer long: streams that began at once end and begin together, so that a window of
    # another length has more of their beginnings in it, or fewer, than it should.
    return Load(f"{streams} streams", streams, ANSWER_TOKENS, warmup_s=5.0, window_s=ANSWER_S)


def _burst(streams: int) -> Load:
    return Load(f"{streams} at once", streams, ANSWER_TOKENS)


# One token an answer: what a request costs besides its tokens.
REQUESTS = Load("requests", 8, 1, warmup_s=1.0, window_s=5.0)
BURSTS = (_burst(32), _burst(256))
STEADY = tuple(_steady(streams) for streams in (64, 128, 256, 384, 512))
# A real engine on the same cores: it gives what they leave it.
REAL = tuple(
    Load(f"{streams} streams", streams, 64, warmup_s=2.0, window_s=8.0) for streams in (1, 8, 32)
)

NOW = "a07807c"
SLICEWISE = "Slicewise"
SLICEWISE_NOW = f"Slicewise at {NOW}"
TWO_GATEWAYS, ONE_GATEWAY = "two gateways", "one gateway"
RAY_DEFAULT = "Ray Serve LLM, default"
RAY_FLAGS = "Ray Serve LLM, throughput flags"
RAY_DIRECT = "Ray Serve LLM, direct streaming"
SLICEWISE_NAPS, VLLM_NAPS = "Slicewise, engine naps", "vLLM's server, engine naps"
SLICEWISE_SPINS, VLLM_SPINS = "Slicewise, engine spins", "vLLM's server, engine spins"

_ALL = (*BURSTS, REQUESTS, *STEADY)
# Where one gateway has enough to do that another can take some of it.
_FROM_128 = tuple(load for load in _ALL if load.streams >= 128 or load is REQUESTS)
# Ray Serve LLM's slower ways have lost half of the rate by then.
_UP_TO_256 = tuple(load for load in _ALL if load.streams <= 256)
COMPARISONS = (
    Comparison("now", SLICEWISE, SLICEWISE_NOW, _ALL),
    # An account of CPU, and no contest.
    Comparison("gateways", TWO_GATEWAYS, ONE_GATEWAY, _FROM_128, num_pairs=5),
    Comparison("ray-direct", SLICEWISE, RAY_DIRECT, _ALL),
    Comparison("ray-flags", SLICEWISE, RAY_FLAGS, _UP_TO_256),
    Comparison("ray-default", SLICEWISE, RAY_DEFAULT, _UP_TO_256),
    Comparison("vllm-naps", SLICEWISE_NAPS, VLLM_NAPS, REAL),
    Comparison("vllm-spins", SLICEWISE_SPINS, VLLM_SPINS, REAL),
)


def sharing(comparisons: Sequence[Comparison]) -> list[tuple[Comparison, ...]]:
    """The comparisons in groups of one or two that share the visit to our system.

    Two at most, so that ours comes right before or after each of the others.
    """
    groups: list[tuple[Comparison, ...]] = []
    for each in comparisons:
        single = next((it for it in groups if len(it) == 1 and it[0].is_of_the_same(each)), None)
        if single is None:
            groups.append((each,))
        else:
            groups[groups.index(single)] = (*single, each)
    return groups


def offered_per_s(load: Load) -> float:
    """Tokens per second that the streams of a load take in with a paced engine and nothing else."""
    return load.streams * ANSWER_TOKENS / ANSWER_S
