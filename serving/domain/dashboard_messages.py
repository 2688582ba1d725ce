"""The messages between gateways and the dashboard: samples of counters, and requests for pages.

Owns their shape. A gateway hands out a sample once a second and forwards the requests of browsers.
The dashboard makes the history and the pages. Does not own either side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """The counts of one model on one compute class since the gateway started.

    `compute_class` is empty for sequences that no engine has taken. Histograms hold the number of
    samples in each bucket, the last one beyond all bounds.
    """

    model: str
    compute_class: str
    sequences: Mapping[str, int]  # by outcome
    resumes: Mapping[str, int]  # by cause
    link_losses: Mapping[str, int]  # by cause
    output_tokens: int
    to_first_token: tuple[int, ...]
    per_output_token: tuple[int, ...]
    in_flight: int


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """The requests of one model without an engine: those that wait now, those refused so far."""

    model: str
    waiting: int
    refused: int


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """The share of one linked engine's KV cache that is in use, 0 to 1."""

    engine_id: str
    model: str
    kv_usage_ratio: float


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The chips of one model and compute class in one state of the ledger, and their cost so far.

    `usd` is `None` where the compute class has no price.
    """

    model: str
    compute_class: str
    state: str
    num_chips: int
    usd: float | None


@dataclass(frozen=True, slots=True)
class GatewaySample:
    """The numbers of one gateway at one instant.

    `taken_at_s` is on the gateway's monotonic clock, so the difference of two samples is the time
    between them. The ledger is that of the whole fleet, the same at every gateway; all other
    numbers are the gateway's own.
    """

    gateway_id: str
    taken_at_s: float
    to_first_token_bounds_s: tuple[float, ...] = ()
    per_output_token_bounds_s: tuple[float, ...] = ()
    models: tuple[ModelCounts, ...] = ()
    classes: tuple[ClassCounts, ...] = ()
    engines: tuple[EngineUsage, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The request of a browser for a page, a part of it or the history. It has been authorized."""

    path: str
    query: str = ""
    if_none_match: str = ""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """The response to a `PageRequest`."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
