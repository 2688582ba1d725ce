"""A scrape as tests want to see it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from serving.exporters.collector import Collector, PciBus, PciFunction
from serving.exporters.compose import HostDescription
from serving.exporters.identity import read_identity
from serving.exporters.scrape import Exporter
from serving.exporters.series import HistogramValue, Series

V6E_HOST = {
    "TPU_NAME": "slice-0",
    "TPU_WORKER_ID": "1",
    "NODE_NAME": "node-1",
    "TPU_ACCELERATOR_TYPE": "tpu-v6e-slice",
    "TPU_TOPOLOGY": "4x4",
    "SLICEWISE_COMPUTE_CLASS": "v6e-spot",
}


class FixedCollector:
    """A collector that always says the same."""

    target = ""

    def __init__(self, name: str, raw: object) -> None:
        self.name = name
        self.raw = raw

    def collect(self, timeout_s: float) -> object:
        return self.raw


def bus(num_chips: int = 4, device: str = "0x006f") -> PciBus:
    return PciBus(
        functions=tuple(
            PciFunction(address=f"0000:00:0{4 + index}.0", device=device, iommu_group=f"{index}")
            for index in range(num_chips)
        )
    )


def exporter(
    *collectors: Collector,
    environment: dict[str, str] | None = None,
    budget_s: float = 20.0,
    expected_chips: int | None = None,
) -> Exporter:
    identity = read_identity(V6E_HOST if environment is None else environment)
    return Exporter(collectors, HostDescription(identity, expected_chips), "1.2.3", budget_s)


class Scrape:
    """The series of one scrape, to be asked by name and labels."""

    def __init__(self, series: Sequence[Series]) -> None:
        self.series = series

    @property
    def names(self) -> set[str]:
        return {one_series.metric for one_series in self.series}

    def all(self, metric: str, **labels: str) -> list[Series]:
        wanted = labels.items()
        return [
            one_series
            for one_series in self.series
            if one_series.metric == metric and wanted <= dict(one_series.labels).items()
        ]

    def by(self, label: str, metric: str, **labels: str) -> dict[str, float]:
        """Values by one label; an empty text for a series without it."""
        found = {}
        for one_series in self.all(metric, **labels):
            assert not isinstance(one_series.value, HistogramValue)
            key = dict(one_series.labels).get(label, "")
            assert key not in found, f"two series of {metric} with {label}={key}"
            found[key] = one_series.value
        return found

    def value(self, metric: str, **labels: str) -> float | None:
        found = self.all(metric, **labels)
        assert len(found) <= 1, found
        if not found:
            return None
        assert not isinstance(found[0].value, HistogramValue)
        return found[0].value

    def success(self, collector: str) -> float | None:
        return self.value("tpu_scrape_collector_success", collector=collector)

    def errors(self, collector: str) -> dict[str, float]:
        return self.by("code", "tpu_scrape_collector_errors_total", collector=collector)


def scrape(source: Exporter, budget_s: float | None = None) -> Scrape:
    return Scrape(source.scrape(budget_s))


def write_files(root: Path, files: Iterable[tuple[str, str]]) -> None:
    for name, text in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
