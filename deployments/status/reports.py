"""The reader's half of the contract of `/fleet`: what `slicewise status` takes from the answer.

It takes what it knows and ignores what a newer gateway adds; what an older one lacks has a default.
"""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.status.gateway import FleetUnavailableError


class _Reported(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ReportedEngine(_Reported):
    """The report of one engine. `None` means that the gateway does not know it (yet)."""

    engine_id: str | None = None
    compute_class: str | None = None
    state: str | None = None
    since_s: float | None = None
    linked: bool | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage_ratio: float | None = None
    in_flight: int | None = None


class ReportedHost(_Reported):
    """The report of one host of a slice."""

    num_chips: int


class ReportedSlice(_Reported):
    """The report of one slice, or of a replica that waits for one; `None`: none, or unknown."""

    name: str | None = None
    replica_id: str | None = None
    compute_class: str | None = None
    state: str | None = None
    since_s: float | None = None
    reason: str | None = None
    generation: str | None = None
    topology: str | None = None
    hosts: tuple[ReportedHost, ...] = ()
    model: str | None = None
    in_flight: int | None = None


class ReportedSupplyHost(_Reported):
    """The report of one host: its pod, its machine, its Ray node; `None`: not there, or unknown."""

    worker_id: int
    pod: str | None = None
    machine: str | None = None
    node_id: str | None = None
    address: str | None = None
    num_chips: int | None = None


class ReportedSupply(_Reported):
    """The report of one slice that exists or was asked for, whoever has it.

    `incarnation` tells two of one name apart; `None` when the gateway is too old for it.
    """

    name: str
    incarnation: str | None = None
    state: str
    since_s: float
    reason: str
    compute_class: str | None = None
    generation: str | None = None
    topology: str | None = None
    group: str | None = None
    num_chips: int | None = None
    ends_in_s: float | None = None
    num_failures: int = 0
    replica_id: str | None = None
    hosts: tuple[ReportedSupplyHost, ...] = ()


class ReportedOrder(_Reported):
    """The report of an operator's order that stands; `ends_in_s` of `None`: until it is lifted."""

    kind: str
    by: str
    reason: str
    since_s: float
    about: str = ""
    name: str = ""
    ends_in_s: float | None = None
    model: str | None = None
    num_replicas: int | None = None


class ReportedLine(_Reported):
    """The report of what waits of one tenant in one class of service."""

    tenant: str
    service_class: str
    waiting: int


class ReportedQuota(_Reported):
    """The report of a tenant's use of one quota, over all gateways, in the quota's period.

    `refused` requests were refused because of it: in the same period, or within the last hour where
    requests in flight are bounded. `None` when the gateway is too old to count them.
    """

    tenant: str
    quota: str
    limit: float = Field(gt=0)
    used: float
    refused: int | None = None


class ReportedForecast(_Reported):
    """The report of prompt tokens expected in engines' caches; see `CacheForecast`."""

    found: int = 0
    missing: int = 0
    unforeseen: int = 0


class ReportedModel(_Reported):
    """The report of one model: its engines, and the requests that wait for any of them.

    `promised` requests were refused with a time to come back. `line_tenants` are those of which
    most waits. `line_mean_wait_s` is how long sequences that engines took in the last half minute
    had waited, by class of service, and `refusals` are counts by the error's code, since the
    gateway's start. `dispatches` are the sequences that engines were given, by what decided on
    which.
    """

    name: str
    engines: tuple[ReportedEngine, ...]
    waiting: int
    promised: int = 0
    line_tenants: tuple[ReportedLine, ...] = ()
    line_mean_wait_s: dict[str, float] = {}
    refusals: dict[str, int] = {}
    cache_forecast: ReportedForecast = ReportedForecast()
    dispatches: Mapping[str, int] = Field(default_factory=dict)


class ReportedGateway(_Reported):
    """The gateway that answered; another one may see other loads."""

    id: str
    uptime_s: float


class ReportedChange(_Reported):
    """The change of a compute class's slices, and why; of all classes where it names none."""

    compute_class: str
    delta: int
    reason: str


class ReportedPlan(_Reported):
    """The scaling plan of one model."""

    model: str
    demand_slices: float | None = None
    targets: dict[str, int]
    arithmetic: str = ""
    next_slice_in_s: float | None = None
    refusals: tuple[ReportedChange, ...] = ()
    alerts: tuple[str, ...] = ()


class ReportedAutoscaling(_Reported):
    """The last scaling plans. `age_s` is `None` when there was none yet."""

    age_s: float | None = None
    alerts: tuple[str, ...] = ()
    models: tuple[ReportedPlan, ...] = ()


class ReportedFleet(_Reported):
    """The answer of `/fleet`.

    `slices` is `None` when the gateway is too old for them, `autoscaling` where nothing scales.
    `quotas` are those that are nearest to their limits, the nearest first, but for the
    `quotas_left_out`.
    """

    models: tuple[ReportedModel, ...]
    gateway: ReportedGateway
    slices: tuple[ReportedSlice, ...] | None = None
    supply: tuple[ReportedSupply, ...] = ()
    orders: tuple[ReportedOrder, ...] = ()
    quotas: tuple[ReportedQuota, ...] = ()
    quotas_left_out: int = 0
    autoscaling: ReportedAutoscaling | None = None


def parse_fleet(body: str) -> ReportedFleet:
    """The fleet in the JSON text `body`.

    Raises:
        FleetUnavailableError: it is not the answer of a gateway of ours.
    """
    try:
        return ReportedFleet.model_validate_json(body)
    except ValidationError as error:
        where = ", ".join(".".join(map(str, detail["loc"])) or "all" for detail in error.errors())
        raise FleetUnavailableError(
            f"the answer is not a fleet (wrong at: {where}); is that address a Slicewise gateway?"
        ) from error
