"""Runs whose every latency is known, made without a client or a server."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from loadtest.histogram import bucket_of
from loadtest.records import (
    ClientSample,
    EventRecord,
    FleetSample,
    Record,
    RequestRecord,
    RunEnd,
    RunStart,
    encode,
)
from loadtest.scorecard.stored_run import RECORDS_FILE, StoredRun, gather


def made_request(
    number: int, at_s: float, *, ttft_s: float = 0.1, tpot_s: float = 0.02, tokens: int = 11,
    lag_s: float = 0.0, stall_s: float = 0.0, **changes: Any,
) -> RequestRecord:  # fmt: skip
    """One whole answer: a token per event, evenly spaced, `stall_s` more before the middle one."""
    sent_s = at_s + lag_s
    first_s = sent_s + ttft_s
    num_gaps = tokens - 1
    last_s = first_s + num_gaps * tpot_s + stall_s
    gaps = {bucket_of(tpot_s): num_gaps} if num_gaps else {}
    longest_s = tpot_s + stall_s if num_gaps else None
    if stall_s:
        gaps = {bucket_of(tpot_s): num_gaps - 1, bucket_of(tpot_s + stall_s): 1}
    request = RequestRecord(
        request_id=f"r{number}", worker=0, model="demo", api="completions",
        scheduled_s=at_s, sent_s=sent_s, first_s=first_s, last_s=last_s, ended_s=last_s,
        planned_input_tokens=100, planned_output_tokens=tokens, http_status=200,
        input_tokens=100, output_tokens=tokens, num_chunks=tokens, gap_counts=gaps,
        longest_gap_s=longest_s,
        longest_gap_at_s=first_s + tpot_s * (num_gaps // 2) if num_gaps else None,
        finish_reason="length",
    )  # fmt: skip
    return msgspec.structs.replace(request, **changes)


def failed_request(number: int, at_s: float, error: str, **changes: Any) -> RequestRecord:
    """One that failed 0.3 s after it was sent, without a token."""
    return made_request(
        number, at_s, error=error, first_s=None, last_s=None, ended_s=at_s + 0.3,
        output_tokens=None, input_tokens=None, num_chunks=0, gap_counts={}, longest_gap_s=None,
        longest_gap_at_s=None, finish_reason=None, **changes,
    )  # fmt: skip


def calm_sample(at_s: float, worker: int = 0, **changes: Any) -> ClientSample:
    """A second of a client with nothing to reproach it for."""
    sample = ClientSample(at_s, worker, 0.2, 0.001, {bucket_of(0.0005): 190}, 4, 10, 500)
    return msgspec.structs.replace(sample, **changes)


def ready_slices(at_s: float, **slices_of_class: int) -> FleetSample:
    """Ready slices of 16 chips by compute class."""
    return FleetSample(
        at_s,
        {
            name: {"ready": {"slices": number, "chips": 16 * number}}
            for name, number in slices_of_class.items()
        },
    )


@dataclass(frozen=True)
class MadeRun:
    """Records of a run to be; a valid client and a whole schedule unless changed."""

    requests: tuple[RequestRecord, ...]
    duration_s: float = 60.0
    warmup_s: float = 0.0
    num_workers: int = 1
    num_scheduled: int | None = -1
    client: tuple[ClientSample, ...] | None = None
    fleet: tuple[FleetSample, ...] = ()
    events: tuple[EventRecord, ...] = ()
    end: RunEnd | None = field(default_factory=lambda: RunEnd(60.0))
    plan: dict[str, object] = field(default_factory=lambda: {"arrivals": {"rate": 2.0}})

    @property
    def records(self) -> list[Record]:
        num_scheduled = len(self.requests) if self.num_scheduled == -1 else self.num_scheduled
        start = RunStart(
            1_790_000_000.0, "http://127.0.0.1:8000", self.duration_s, self.warmup_s,
            self.num_workers, 7, num_scheduled, self.plan,
        )  # fmt: skip
        client = self.client
        if client is None:
            client = tuple(
                calm_sample(float(second), worker)
                for second in range(int(self.duration_s))
                for worker in range(self.num_workers)
            )
        last = () if self.end is None else (self.end,)
        return [start, *client, *self.requests, *self.fleet, *self.events, *last]

    @property
    def stored(self) -> StoredRun:
        return gather(self.records)

    def but(self, **changes: Any) -> "MadeRun":
        return replace(self, **changes)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORDS_FILE).write_bytes(b"".join(map(encode, self.records)))
        return folder


def steady_run(
    num: int = 120, make: Callable[[int, float], RequestRecord] = made_request
) -> MadeRun:
    """`num` requests, evenly due over a minute."""
    return MadeRun(tuple(make(index, 60.0 * index / num) for index in range(num)))


def eventful_run(seed: int = 3, slower: float = 1.0) -> MadeRun:
    """Ten minutes of two classes with two preemptions, failures, tenants and a warm-up."""
    chance = random.Random(seed)
    events = (
        EventRecord(180.0, "preempt", "v6e-spot-0", "15 s notice", 195.0),
        EventRecord(390.0, "slow", "v6e-spot-1", "to a third", 430.0),
        EventRecord(395.0, "kill", "v6e-spot-7", error="there is no such slice"),
    )
    requests = tuple(_eventful_request(n, chance, slower) for n in range(1200))
    return MadeRun(
        tuple(sorted(requests, key=lambda each: each.ended_s)),
        duration_s=600.0,
        warmup_s=30.0,
        num_workers=2,
        fleet=tuple(_eventful_fleet(float(second)) for second in range(0, 621)),
        events=events,
        end=RunEnd(620.0),
        plan={
            "arrivals": {"law": "poisson", "rate_per_s": 2.0},
            "lengths": {"input_tokens": 512, "output_tokens": "lognormal <200>"},
            "check": "paced",
        },
    )


def _eventful_request(number: int, chance: random.Random, slower: float) -> RequestRecord:
    at_s = chance.uniform(0, 600)
    is_hit = 180 <= at_s < 215 or 390 <= at_s < 430
    tenant = chance.choice(["acme", "acme", "<b>zeta</b>"])
    if is_hit and chance.random() < 0.04:
        return failed_request(number, at_s, chance.choice(["timeout", "unavailable_503"]))
    return made_request(
        number, at_s,
        ttft_s=slower * chance.lognormvariate(-2.0, 0.35) * (3 if is_hit else 1),
        tpot_s=slower * chance.lognormvariate(-3.7, 0.1) * (1.6 if is_hit else 1),
        tokens=chance.randint(20, 300),
        lag_s=chance.uniform(0.0001, 0.004),
        stall_s=chance.uniform(0.2, 0.6) if 185 <= at_s < 196 else 0.0,
        tenant=tenant, priority=chance.choice([0, 0, 1]), worker=number % 2,
        lost_tokens=0, repeated_tokens=0, foreign_tokens=0, cached_tokens=32,
    )  # fmt: skip


def _eventful_fleet(at_s: float) -> FleetSample:
    spot: dict[str, dict[str, int]] = {"ready": {"slices": 2, "chips": 32}}
    if 180 <= at_s < 195:
        spot = {"ready": {"slices": 1, "chips": 16}, "draining": {"slices": 1, "chips": 16}}
    elif 195 <= at_s < 240:
        spot = {"ready": {"slices": 1, "chips": 16}, "requested": {"slices": 1, "chips": 16}}
    elif 240 <= at_s < 260:
        spot = {"ready": {"slices": 1, "chips": 16}, "loading": {"slices": 1, "chips": 16}}
    return FleetSample(at_s, {"spot": spot, "reserved": {"ready": {"slices": 1, "chips": 16}}})
