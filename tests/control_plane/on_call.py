"""What an on-call sees: the provisioner's page at a real API server, and Prometheus' rules over it.

Watches, loop, road to the directory and collector are the product's, wired as `process` does it.
The test holds the clocks, and what the directory writes into Ray's store.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.cluster import WatchedCluster
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.reconcile import Reconciler
from autoscaling.provisioning.sidecar.conditions import ConditionWatch
from autoscaling.provisioning.sidecar.directory import DirectoryRoad
from autoscaling.provisioning.sidecar.metrics import ProvisionerCollector, ProvisionerState
from autoscaling.provisioning.sidecar.rounds import RoundLog
from serving.domain.slice_records import LEASE_S
from serving.domain.supply.beat import ReportBeat
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.pods import ObservedSlice
from serving.domain.supply.records import SupplyReport, encode_supply

from .ray_objects import CLUSTER, SERVICE

RULES = Path(__file__).resolve().parents[2] / "deployments/prometheus/rules/platform.rules.yml"
WITHIN_S = 60.0
_POLL_S = 0.05
# Longer than a watch takes to count as caught up.
_STALE_AFTER_S = 3.0
_STEP_S = 15

# What a scrape makes of a page: the value of each series, by name and labels as PromQL has them.
Page = dict[str, float]


class Store:
    """Ray's key-value store, as far as directory and provisioner use it."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def internal_kv_get(self, key: bytes, *, timeout: float) -> bytes | None:
        assert timeout > 0
        return self.values.get(key)

    def internal_kv_put(self, key: bytes, value: bytes, *, overwrite: bool, timeout: float) -> None:
        assert overwrite
        assert timeout > 0
        self.values[key] = value


class OnCall:
    """A provisioner that runs, and its page. Times begin at 0 and pass when the test says so."""

    def __init__(self, access: KubernetesAccess) -> None:
        self.now_s = 0.0
        self.store = Store()
        self.api = KubernetesApi(access)
        changed = asyncio.Event()
        self.watched = WatchedCluster(self.api, CLUSTER, changed.set, stale_after_s=_STALE_AFTER_S)
        self.rounds = RoundLog(self._clock)
        self.road = DirectoryRoad(self.store, "slicewise", self._clock)
        self.conditions = ConditionWatch(
            self.api, CLUSTER, SERVICE, retry_s=0.2, stale_after_s=_STALE_AFTER_S
        )
        self.reconciler = Reconciler(
            self.road.read_supply,
            KubeRayProvisioner(self.api, CLUSTER, self.watched),
            ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=0.0),
            fence=_hold,
            report_pods=self.road.report_pods,
            interval_s=0.5,
            look_interval_s=0.05,
            changed=changed,
            observer=self.rounds,
            clock=self._clock,
        )
        self._collector = ProvisionerCollector(self._read, self._clock)
        self._keys = SupplyKeys("slicewise")
        self._num_reports = 0

    def report(self, **parts: object) -> None:
        """The directory writes a report, and that it lives."""
        self._num_reports += 1
        report = SupplyReport(f"test:{self._num_reports}", **parts)  # type: ignore[arg-type]
        self.store.values[self._keys.supply] = encode_supply(report)
        beat = ReportBeat(report.version, self._num_reports)
        self.store.values[self._keys.supply_beat] = beat.encode()

    def page(self) -> Page:
        """The page as it is now."""
        return {
            _series(sample.name, sample.labels): sample.value
            for family in self._collector.collect()
            for sample in family.samples
        }

    async def shows(self, what: Mapping[str, Callable[[float], bool]]) -> Page:
        """Waits until series have values; the page that has them all."""
        page: Page = {}
        try:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    page = self.page()
                    if all(name in page and is_so(page[name]) for name, is_so in what.items()):
                        return page
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError({name: page.get(name) for name in what}) from None

    def _clock(self) -> float:
        return self.now_s

    def _read(self) -> ProvisionerState:
        return ProvisionerState(
            self.rounds.so_far(), self.road.silence_s, self.conditions.current()
        )


@asynccontextmanager
async def on_call(
    access: KubernetesAccess,
    conditions: Sequence[str] = ("pods", "computeclasses", "resourcequotas"),
) -> AsyncIterator[OnCall]:
    """One that runs, whose rounds go well, and which reads these of the conditions."""
    found = OnCall(access)
    found.report()
    async with found.watched:
        tasks = [
            asyncio.create_task(found.conditions.follow()),
            asyncio.create_task(found.reconciler.run()),
        ]
        try:
            await found.shows(
                {
                    "slicewise_provisioning_success_time_seconds": lambda value: value == 0.0,
                    series("slicewise_control_pods_wanted", component="head"): bool,
                    **{
                        series("slicewise_condition_readable", resource=n): bool for n in conditions
                    },
                }
            )
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await found.api.aclose()


async def _hold(_: ObservedSlice) -> str | None:
    return "the test holds it"


@dataclass(frozen=True)
class Seen:
    """A page that Prometheus has scraped for so long."""

    page: Page
    minutes: float


def firing(folder: Path, *seen: Seen) -> dict[str, list[dict[str, str]]]:
    """The alerts that fire at the end, by name, with the labels of each, by the shipped rules.

    promtool evaluates them over exactly these pages, as a target of the installation.
    """
    names = sorted({name for each in seen for name in each.page})
    series = []
    for name in names:
        values: list[str] = []
        for each in seen:
            value = each.page.get(name)
            count = round(each.minutes * 60 / _STEP_S)
            values += [f"{value!r}" if value is not None else "stale"] * count
        head, _, labels = name.partition("{")
        full = f'{head}{{installation="{SERVICE}",{labels or "}"}'.replace(",}", "}")
        series.append({"series": full, "values": " ".join(values)})
    end_m = sum(each.minutes for each in seen)
    test = {
        "interval": f"{_STEP_S}s",
        "input_series": series,
        # Nothing is expected, so that what is there is told.
        "promql_expr_test": [
            {
                "expr": 'ALERTS{alertstate="firing"}',
                "eval_time": f"{round(end_m * 60 - _STEP_S)}s",
                "exp_samples": [{"labels": "nothing", "value": 0}],
            }
        ],
    }
    path = folder / "alerts.test.yml"
    whole = {"rule_files": [f"{RULES}"], "evaluation_interval": "15s", "tests": [test]}
    path.write_text(yaml.safe_dump(whole))
    done = subprocess.run(
        ["promtool", "test", "rules", f"{path}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = done.stdout + done.stderr
    (got,) = [line.partition("got:")[2].strip() for line in text.splitlines() if "got:" in line]
    return {} if got == "nil" else _alerts(got)


def _alerts(text: str) -> dict[str, list[dict[str, str]]]:
    """Reads samples as promtool prints them."""
    found: dict[str, list[dict[str, str]]] = {}
    while text.startswith("{"):
        inside, _, text = text[1:].partition("} ")
        labels = yaml.safe_load("{" + inside.replace("=", ": ") + "}")
        found.setdefault(labels.pop("alertname"), []).append(
            {name: str(value) for name, value in labels.items()}
        )
        text = text.partition("{")[2] and "{" + text.partition("{")[2]
    return found


def _series(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    inside = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
    return f"{name}{{{inside}}}"


def series(name: str, **labels: str) -> str:
    """A series as pages have it."""
    return _series(name, labels)


def alerts_of_the_rules() -> Sequence[str]:
    """The names of all alerts of the control plane."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]
