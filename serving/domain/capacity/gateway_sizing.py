"""How many gateways a load needs: what tokens and requests cost one, and how full one may be. Pure.

A gateway is one process whose event loop is on one core. Its share of that core is

    OWN_RATIO + tokens_per_s * TOKEN_S + requests_per_s * REQUEST_S

The number is the larger one of two: with all of them there, none is above `FILL_RATIO`; with one of
them away, where there is more than one engine, none of the others is above `FILL_RATIO_ONE_AWAY`.
So a small fleet has one to spare, and a large one has enough without.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from serving.domain.capacity.slice_profile import ASSUMED_OUTPUT_TOKENS

# CPU of one token and of one request, in seconds of a core (shared x86 cores, vLLM 0.32, 880b43b,
# 2026-11-28; medians of 5 to 15 pairs, `docs/results/benchmarks.md`).
# A token: 50 us at 64 streams of 200 tokens in the whole application, one gateway or each of two,
# of which 15 are a request's own and the rest `OWN_RATIO`. Fewer with more streams, 24 at 512: a
# loop with few of them wakes up for each.
TOKEN_S = 30e-6
# A request: a chat stream of one token, eight clients, the whole application behind HAProxy: 2.4 to
# 3.0 ms, of a form that the gateway has handled before (ADR 31). The longer the prompt the more;
# bodies above 256 KiB are read beside the loop.
REQUEST_S = 3.0e-3
# Timers and Ray's threads of a gateway without requests: 1.9 % of a core there.
OWN_RATIO = 0.02
# Up to half of a core no token waits to be sent with others, so streams keep their grain, and a
# burst of new requests finds room. (`serving.gateway.streams.pace`.)
FILL_RATIO = 0.5
# With one gateway away its clients ask again at the others. At this share tokens wait for half of
# `gateway.max_hold_s`, and nothing is refused.
FILL_RATIO_ONE_AWAY = 0.7

# Where nobody says what an engine emits. A sequence among as many as the engine takes gets
# a token each 50 ms: the two full batches that this repository knows are at 36 tokens/s (68
# sequences, derived from llm-d's published benchmark) and 6 (256 sequences, expected for v6e 2x4).
# Read 2026-11-21; not measured on a TPU.
ASSUMED_SEQUENCE_TOKENS_PER_S = 20.0
# More than these are not configured, whoever counts them.
MAX_GATEWAYS = 1024


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The tokens that all engines of a model emit at most, and what that is known from."""

    num_engines: int
    tokens_per_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayCount:
    """How many gateways there are, and why."""

    number: int
    reason: str


def needed_gateways(
    outputs: Sequence[EngineOutput],
    tokens_per_s: float | None = None,
    requests_per_s: float | None = None,
) -> GatewayCount:
    """Returns how many gateways serve these engines, at least one.

    A rate that is given is expected of the application, and takes the place of what is computed:
    of all that engines can emit, and of as many requests as that is answers.

    Raises:
        ValueError: a rate is negative, infinite or no number.
    """
    num_engines = sum(output.num_engines for output in outputs)
    if tokens_per_s is None:
        tokens_per_s = sum(output.tokens_per_s for output in outputs)
        basis = "; ".join(output.reason for output in outputs) or "no engines"
    else:
        basis = "expected"
    answers = "expected"
    if requests_per_s is None:
        requests_per_s = tokens_per_s / ASSUMED_OUTPUT_TOKENS
        answers = f"answers of {ASSUMED_OUTPUT_TOKENS} tokens, assumed"
    cores = gateway_cores(tokens_per_s, requests_per_s)
    load = (
        f"{tokens_per_s:,.0f} tokens/s ({basis}) and {requests_per_s:,.0f} requests/s ({answers}) "
        f"need {cores:.2f} cores"
    )
    filled = _at_most(cores, FILL_RATIO)
    spared = 1 + _at_most(cores, FILL_RATIO_ONE_AWAY) if num_engines > 1 else 0
    if spared > filled:
        away = "with one gateway away each of the others takes at most"
        return GatewayCount(spared, f"{load}; {away} {FILL_RATIO_ONE_AWAY:g} of one")
    return GatewayCount(filled, f"{load}; each gateway takes at most {FILL_RATIO:g} of one")


def gateway_cores(tokens_per_s: float, requests_per_s: float) -> float:
    """Returns the cores that this load takes of gateways, without what each needs for itself.

    Raises:
        ValueError: a rate is negative, infinite or no number.
    """
    for name, rate in (("tokens_per_s", tokens_per_s), ("requests_per_s", requests_per_s)):
        if not 0 <= rate < math.inf:
            msg = f"{name}={rate} must be a number of at least 0"
            raise ValueError(msg)
    return tokens_per_s * TOKEN_S + requests_per_s * REQUEST_S


def _at_most(cores: float, ratio: float) -> int:
    """Returns the fewest gateways of which none uses more than this share of its core."""
    return max(1, math.ceil(cores / (ratio - OWN_RATIO)))
