"""The capture of one scrape: its raw answers, in a file that others can replay.

Owns the file's format. A capture keeps what distinguishes releases of libtpu and leaves out names:
of the slice, the node, pods, models. The error messages of libtpu itself are in it unchanged.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from serving.config.schema import problems_of
from serving.domain.errors import ConfigError
from serving.exporters.collector import (
    AnyRaw,
    Code,
    CollectError,
    CollectorSample,
    Raw,
)
from serving.exporters.compose import HostDescription
from serving.exporters.host_sources import PodCollector, WorkloadCollector
from serving.exporters.identity import Identity
from serving.telemetry.metric_names import HOST_LABELS

_KEPT_LABELS = ("worker", "accelerator", "topology")
# Collectors whose answers are names of pods and models.
_PRIVATE = (PodCollector.name, WorkloadCollector.name)


class CapturedSample(Raw):
    """The sample of one collector as the file has it."""

    collector: str
    target: str
    code: str
    reason: str
    raw: AnyRaw | None


class Capture(Raw):
    """The whole file. `expected_chips` is `None` if only the topology is known."""

    format: Literal[1]
    exporter_version: str
    worker: str
    accelerator: str
    topology: str
    expected_chips: int | None
    readings: tuple[CapturedSample, ...]

    def facts(self) -> HostDescription:
        """Returns the captured host, as far as the file identifies it."""
        kept = {label: getattr(self, label) for label in _KEPT_LABELS}
        labels = tuple((label, kept.get(label, "")) for label in HOST_LABELS)
        return HostDescription(Identity(labels), self.expected_chips)

    def collectors(self) -> tuple["ReplayCollector", ...]:
        """Returns a collector for each that was captured."""
        return tuple(map(ReplayCollector, self.readings))


class ReplayCollector:
    """The collector that gives the captured answer at each scrape."""

    def __init__(self, captured: CapturedSample) -> None:
        self._captured = captured
        self.name = captured.collector
        self.target = captured.target

    def collect(self, timeout_s: float) -> AnyRaw | None:  # noqa: ARG002 - nothing to wait for
        """Returns the captured answer.

        Raises:
            CollectError: the captured answer is a failure.
        """
        if self._captured.code != Code.OK:
            raise CollectError(self._captured.code, self._captured.reason)
        return self._captured.raw


def write_capture(
    path: Path, samples: Iterable[CollectorSample], facts: HostDescription, exporter_version: str
) -> None:
    """Writes the file whole or not at all.

    Raises:
        OSError: it cannot be written there.
    """
    capture = Capture(
        format=1,
        exporter_version=exporter_version,
        expected_chips=facts.expected_chips,
        readings=tuple(
            CapturedSample.model_validate(sample, from_attributes=True)
            for sample in samples
            if sample.collector not in _PRIVATE
        ),
        worker=facts.identity["worker"],
        accelerator=facts.identity["accelerator"],
        topology=facts.identity["topology"],
    )
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(capture.model_dump_json(indent=1))
    draft.replace(path)


def read_capture(path: Path) -> Capture:
    """Returns the capture in that file.

    Raises:
        ConfigError: the file is no capture; every problem is named.
        OSError: it cannot be read.
    """
    try:
        return Capture.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(problems_of(error, Capture.model_json_schema())) from error
