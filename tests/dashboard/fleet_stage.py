"""A fleet to look at: slices in every state, shown by the real edge on a port of this machine.

Time stands still unless a test moves it, so that what is shown is known.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from serving.config.api_keys import read_keys
from serving.dashboard.history import History
from serving.dashboard.pages import DashboardPages
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import DashboardUnavailableError
from serving.domain.plan_report import ModelPlan, PlanChange, PlanReport
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import Directory, HostRecord, SliceRecord
from serving.domain.usage.quotas import Period, Quota, QuotaKind, TenantUse
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.edge.readiness import Readiness
from serving.gateway.reports.fleet_view import (
    EngineStatus,
    GatewayView,
    ModelView,
    describe_fleet,
    describe_plans,
)
from serving.link.messages import EngineLoad

MINUTE_S = 60.0
HOUR_S = 60 * MINUTE_S
NOW_S = 1_795_226_400.0  # 2026-11-21 02:00 UTC
CHAT, CODE = "gemma-3-27b-it", "qwen3-coder-30b"

_REASONS = {
    SliceState.REQUESTED: "a replica wants a slice",
    SliceState.PROVISIONING: "no slice of v6e 4x4 is free: 3 of 3 are held",
    SliceState.PROBING: "chips and interconnect are tried out",
    SliceState.LOADING: "the engine starts",
    SliceState.READY: "the engine takes requests",
}


def life_of(
    name: str | None, *entered: tuple[SliceState, float], reason: str = ""
) -> SliceLifecycle:
    """A life from the states entered, each with how long ago; `reason` is the last one's."""
    (_, first_s), *later = entered
    life = SliceLifecycle.begin(NOW_S - first_s)
    for state, ago_s in later:
        is_named = state not in (SliceState.REQUESTED, SliceState.PROVISIONING)
        words = _REASONS.get(state, f"holds every host of {name}" if name else "no slices here")
        life = life.enter(state, NOW_S - ago_s, words, slice_name=name if is_named else None)
    return life.enter(life.state, NOW_S, reason) if reason else life


def held(
    name: str,
    shape: tuple[str, str, int, int],
    model: str,
    compute_class: str,
    life: SliceLifecycle,
) -> SliceRecord:
    """A replica that holds a slice: generation, topology, hosts, chips of each."""
    generation, topology, num_hosts, chips = shape
    hosts = tuple(
        HostRecord(worker, f"node-{name}-{worker}", f"10.0.{len(name)}.{10 + worker}", chips)
        for worker in range(num_hosts)
    )
    return SliceRecord(
        f"replica-{name}", model, compute_class, life, generation, topology, hosts, f"engine-{name}"
    )  # fmt: skip


def waiting(
    number: int,
    shape: tuple[str, str, int, int],
    model: str,
    compute_class: str,
    life: SliceLifecycle,
) -> SliceRecord:
    """A replica that holds nothing yet."""
    return SliceRecord(f"replica-w{number}", model, compute_class, life, shape[0], shape[1])


def ready(name: str | None, since_s: float) -> SliceLifecycle:
    """A life that has been ready for so long, after some minutes of getting there."""
    return life_of(
        name,
        (SliceState.REQUESTED, since_s + 11 * MINUTE_S),
        (SliceState.PROVISIONING, since_s + 10 * MINUTE_S),
        (SliceState.RESERVED, since_s + 3 * MINUTE_S),
        (SliceState.PROBING, since_s + 2.8 * MINUTE_S),
        (SliceState.LOADING, since_s + 2 * MINUTE_S),
        (SliceState.READY, since_s),
    )


V5P, V6E, V6E_ONE_HOST, V5E = (
    ("v5p", "2x2x4", 4, 4),
    ("v6e", "4x4", 4, 4),
    ("v6e", "2x4", 1, 8),
    ("v5e", "4x8", 8, 4),
)


def example_records() -> Iterator[SliceRecord]:
    """Four compute classes with slices and waiting replicas in every state."""
    for number, hours in ((1, 52.3), (2, 52.1), (3, 7.4)):
        name = f"v5p-res-{number}"
        yield held(name, V5P, CHAT, "reserved", ready(name, hours * HOUR_S))
    draining = ready("v6e-spot-1", 3.2 * HOUR_S).enter(
        SliceState.DRAINING, NOW_S - 11, "host 2: the cloud takes it back (metadata preempted)"
    )
    record = held("v6e-spot-1", V6E, CHAT, "spot", draining)
    yield replace(record, drain_deadline_s=NOW_S + 19)
    yield held("v6e-spot-2", V6E, CODE, "spot", ready("v6e-spot-2", 41 * MINUTE_S))
    yield held("v6e-spot-3", V6E_ONE_HOST, CODE, "spot", ready("v6e-spot-3", 95 * MINUTE_S))
    early = ((SliceState.REQUESTED, 400.0), (SliceState.RESERVED, 95.0))
    loading = life_of("v6e-spot-4", *early, (SliceState.PROBING, 92.0), (SliceState.LOADING, 48.0))
    yield held("v6e-spot-4", V6E, CODE, "spot", loading)
    asked = (SliceState.REQUESTED, 4 * MINUTE_S)
    yield waiting(1, V6E, CHAT, "spot", life_of(None, asked, (SliceState.PROVISIONING, 238.0)))
    yield waiting(2, V6E, CHAT, "spot", life_of(None, (SliceState.REQUESTED, 0.6)))
    probing = life_of("v5e-flex-1", *early, (SliceState.PROBING, 9.0))
    yield held("v5e-flex-1", V5E, CHAT, "flex-start", probing)
    reserved = life_of("v5e-flex-2", (SliceState.REQUESTED, 2500.0), (SliceState.RESERVED, 1.4))
    yield held("v5e-flex-2", V5E, CHAT, "flex-start", reserved)
    local = life_of(
        None,
        (SliceState.REQUESTED, 3700.0),
        (SliceState.RESERVED, 3700.0),
        (SliceState.LOADING, 3700.0),
        (SliceState.READY, 3625.0),
    )
    yield SliceRecord("replica-here", CODE, "local", local, engine_id="engine-here")


def example_ended() -> Iterator[SliceRecord]:
    """One life for each cause of an end, the latest last."""
    ends = (
        ("v5e-flex-9", V5E, "flex-start", EndCause.EXPIRED, 5400, "its 7 days are over"),
        ("v6e-spot-0", V6E, "spot", EndCause.BOOT_FAILED, 3100, "probe: host 3 shows 3 of 4 chips"),
        ("v5p-res-3", V5P, "reserved", EndCause.UNHEALTHY, 2000, "the engine did not answer"),
        ("v6e-spot-8", V6E_ONE_HOST, "spot", EndCause.RELEASED, 900, "the replica is leaving"),
        (
            "v6e-spot-9",
            V6E,
            "spot",
            EndCause.PREEMPTED,
            130,
            "its replica was not heard of for 5 s",
        ),
    )
    for name, shape, compute_class, cause, ago_s, reason in ends:
        if cause == EndCause.BOOT_FAILED:
            life = life_of(
                name, (SliceState.REQUESTED, ago_s + 80.0), (SliceState.RESERVED, ago_s + 70.0)
            )
            life = life.enter(
                SliceState.PROBING, NOW_S - ago_s - 68.0, _REASONS[SliceState.PROBING]
            )
        else:
            life = ready(name, ago_s + 2 * HOUR_S)
        record = held(name, shape, CHAT, compute_class, life.end(cause, NOW_S - ago_s, reason))
        yield replace(record, replica_id=f"{record.replica_id}-before")


def example_board(*alerts: str) -> PlanReport:
    """A plan in the middle of a stock-out, decided four seconds ago."""
    plan = ModelPlan(
        model=CHAT,
        decided_at_s=NOW_S - 4,
        changed_at_s=NOW_S - 95,
        targets={"reserved": 3, "spot": 4, "flex-start": 2},
        demand_slices=9.0,
        next_slice_at_s=NOW_S + 80,
        arithmetic="41.20 requests/s, 44.00 in 240 s by trend: 8.61 slices; need 9, floor 5",
        changes=(PlanChange(compute_class="flex-start", delta=2, reason="need 9, 5 ready"),),
        refusals=(
            PlanChange(compute_class="spot", delta=2, reason="not relied on: a wish is 131 s late"),
        ),
        alerts=alerts,
        num_failures=0,
    )
    return PlanReport(written_at_s=NOW_S - 4, models=(plan,))


def example_uses() -> Iterator[TenantUse]:
    """Four tenants: one over its quota, one near to it, one with several, one that is idle."""
    tokens = Quota(QuotaKind.TOKENS, 5_000_000, Period.DAY, frozenset({CHAT}))
    requests = Quota(QuotaKind.REQUESTS, 600, Period.MINUTE)
    usd, concurrent = Quota(QuotaKind.USD, 50, Period.DAY), Quota(QuotaKind.CONCURRENT, 32)
    yield TenantUse("search", requests, 600, 1204)
    yield TenantUse("search", concurrent, 9, 0)
    yield TenantUse("batch-evaluation", usd, 43.8125, 0)
    for quota, used in ((tokens, 1_250_000), (requests, 12), (usd, 3.2), (concurrent, 2)):
        yield TenantUse("acme", quota, used, 0)
    yield TenantUse("acme", Quota(QuotaKind.CHIP_SECONDS, 7200, Period.DAY), 0, 0)
    yield TenantUse("guests", Quota(QuotaKind.TOKENS, 100_000, Period.DAY), 0, 0)


EXAMPLE_LINES = {
    CHAT: [("acme", "interactive", 4)],
    CODE: [("batch-evaluation", "batch", 120), ("acme", "standard", 3), ("default", "batch", 1)],
}


class Stage:
    """A directory, one gateway's links, its edge, and a dashboard in the same process."""

    def __init__(self, *keys: str) -> None:
        self.now_s = NOW_S
        self.directory = Directory("d")
        self.engines: dict[str, list[EngineStatus]] = {CHAT: [], CODE: []}
        self.num_waiting = dict.fromkeys(self.engines, 0)
        # Of each model: tenant, class of service, how many wait.
        self.lines: Mapping[str, Sequence[tuple[str, str, int]]] = {}
        self.uses: tuple[TenantUse, ...] = ()
        self.is_failing = False
        self.board: PlanReport | None = None  # nothing scales
        self.history = History("5f0c2a9b41de", NOW_S)  # no gateway has reported yet
        self.pages = DashboardPages(self.history)
        self.is_dashboard_away = False
        self.edge = HttpEdge(
            {},
            EdgeRules(ApiKeys(read_keys(",".join(keys))), max_body_bytes=1000),
            render_metrics=lambda _accept: asyncio.sleep(0, (b"", "text/plain")),
            describe_fleet=self.describe,
            ask_dashboard=self.ask_dashboard,
            readiness=lambda: Readiness(is_ready=True, reason="engines take requests"),
        )

    @classmethod
    def example(cls, *keys: str) -> "Stage":
        """The whole example fleet, with load on what serves."""
        stage = cls(*keys)
        stage.num_waiting[CODE] = 3
        for position, record in enumerate(example_records()):
            stage.put(record)
            if record.state in (SliceState.READY, SliceState.DRAINING):
                stage.link(record, 3 + 7 * position % 40, (13 * position % 90) / 100)
        for record in example_ended():
            stage.directory.end(record)
        return stage

    def put(self, record: SliceRecord) -> None:
        """Lists a record, or its change."""
        self.directory.renew(record, self.now_s)

    def link(self, record: SliceRecord, in_flight: int, kv_usage_ratio: float) -> None:
        """Links the gateway to the record's engine, with so much load."""
        assert record.engine_id is not None
        load = EngineLoad(in_flight, 0, kv_usage_ratio)
        is_draining = record.state == SliceState.DRAINING
        engine = EngineStatus(record.engine_id, record.compute_class, is_draining, in_flight, load)
        self.engines[record.model].append(engine)

    def record(self, replica_id: str) -> SliceRecord:
        """The listed record of a replica."""
        (found,) = (r for r in self.directory.snapshot().records if r.replica_id == replica_id)
        return found

    def show_history(self, history: History) -> None:
        """Makes the dashboard one that has this history."""
        self.history, self.pages = history, DashboardPages(history)

    async def ask_dashboard(self, request: PageRequest) -> PageAnswer:
        """The dashboard's answer, as its deployment gives it."""
        if self.is_dashboard_away and request.path == "/fleet/history":
            raise DashboardUnavailableError("its process is away")
        return self.pages.answer(request)

    def describe(self) -> dict[str, Any]:
        """The gateway's answer, as its deployment puts it together."""
        if self.is_failing:
            raise RuntimeError("this gateway fails because the test wants it")
        models = [
            ModelView(self._described_model(name), tuple(engines))
            for name, engines in self.engines.items()
        ]
        gateway = GatewayView("5f0c2a9b41de", NOW_S - 52.5 * HOUR_S)
        plans = None if self.board is None else describe_plans(self.board, self.now_s)
        snapshot = self.directory.snapshot()
        return describe_fleet(gateway, models, snapshot, self.now_s, plans, self.uses)

    def _described_model(self, name: str) -> dict[str, Any]:
        """What `ServedModel.describe` tells, with the tenants of the 20 longest lines."""
        lines = self.lines.get(name, ())
        totals: Counter[str] = Counter()
        for _, service_class, waiting_now in lines:
            totals[service_class] += waiting_now
        longest = sorted(lines, key=lambda line: -line[2])[:20]
        keys = ("tenant", "service_class", "waiting")
        num_waiting = self.num_waiting[name] + sum(totals.values())
        return {
            "name": name,
            "waiting": num_waiting,
            "in_flight": sum(engine.in_flight for engine in self.engines[name]) + num_waiting,
            "line": totals,
            "line_tenants": [dict(zip(keys, line, strict=True)) for line in longest],
        }


class _Server(uvicorn.Server):
    """Leaves Ctrl-C to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(stage: Stage) -> AsyncIterator[str]:
    """Serves the stage's edge on a free port of this machine; yields its address."""
    config = uvicorn.Config(
        stage.edge, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none"
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        # The browser keeps its connections; they are not waited for.
        server.should_exit = server.force_exit = True
        await task
