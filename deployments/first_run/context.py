"""The view that a stage has of its run, and the messages by which it tells what it finds."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployments.first_run.application import ServedApplication
from deployments.first_run.order import RunStage
from deployments.first_run.results import StageResult, parse_result, result_json


@dataclass(frozen=True, slots=True)
class StageContext:
    """The run as one stage sees it.

    `file` is the configuration, `scratch` a folder that is gone after the run, `until_s` the
    monotonic deadline. `address` is that of Ray where a cluster of others is used; `reference` the
    model to compare answers with, where it is not the one that is served. `application` is `None`
    before the first start. Deadlines and what else is held against a clock are `patience` times as
    long as for a machine with nothing else to do.
    """

    stage: RunStage
    file: Path
    settings: Mapping[str, Any]
    scratch: Path
    until_s: float
    address: str | None
    reference: str | None
    application: ServedApplication | None
    earlier: Mapping[str, StageResult]
    tell: Callable[[Mapping[str, Any]], None]
    patience: float = 1.0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; what has to be told before it needs some of them."""
        return self.until_s - time.monotonic()

    @property
    def served(self) -> ServedApplication:
        """The application; only in stages that need one."""
        assert self.application is not None
        return self.application

    def keep(self, name: str, text: str) -> None:
        """Has a file kept as evidence, in the stage's folder."""
        self.tell({"file": name, "text": text})

    def keep_application(self, application: ServedApplication) -> None:
        """Has an application known to the stages that follow, and ended after the last."""
        self.tell({"application": asdict(application)})


def message_of(result: StageResult) -> dict[str, Any]:
    """Returns the last message of a stage."""
    return {"result": result_json(result)}


def context_of(
    request: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]
) -> StageContext:
    """Returns the view in a request; the deadline counts from now."""
    application = request["application"]
    return StageContext(
        RunStage(request["stage"]),
        Path(request["file"]),
        request["settings"],
        Path(request["scratch"]),
        time.monotonic() + request["deadline_s"],
        request["address"],
        request["reference"],
        None if application is None else ServedApplication(**application),
        {name: parse_result(raw) for name, raw in request["earlier"].items()},
        tell,
        request["patience"],
    )


def teller(descriptor: int) -> Callable[[Mapping[str, Any]], None]:
    """Returns what writes messages to a pipe, one line each."""

    def tell(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]

    return tell
