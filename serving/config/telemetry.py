"""The traces and log lines in `serve_config.yaml`.

The rest is in `serving.config.application`.
"""

import logging
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field

from serving.config.sections import STRICT_SECTION
from serving.telemetry.process_log import LogStyle
from serving.telemetry.spans import TraceSettings


class _Section(BaseModel):
    model_config = STRICT_SECTION


class TracingConfig(_Section):
    """Traces of requests, by OpenTelemetry. Off until there is a place to send them."""

    otlp_endpoint: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[A-Za-z0-9._\-\[\]:]+(/[^\s?#]*)?$",
            max_length=500,
            json_schema_extra={"allowed": "an address such as `http://collector:4318`"},
        ),
    ] = None
    """Base address of an OTLP collector that takes HTTP; spans go to `/v1/traces` below it. Left
    out: no traces."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that are traced, of those that come without a `traceparent`; with one,
    its sender has decided."""

    @property
    def settings(self) -> TraceSettings:
        """The settings as a tracer takes them."""
        return TraceSettings(self.otlp_endpoint, self.sample_ratio)


class LogFormat(StrEnum):
    """The forms of a log line."""

    TEXT = "text"  # an event and key=value
    JSON = "json"  # one object


class LogLevel(StrEnum):
    """The least level of the lines that are written."""

    DEBUG = "debug"  # every choice of every request too
    INFO = "info"
    WARNING = "warning"


class LoggingConfig(_Section):
    """Log lines of gateways, slice replicas, engine hosts and host agents."""

    format: Annotated[LogFormat, Field(strict=False)] = LogFormat.TEXT
    """`text`: an event and its facts as `key=value`. `json`: one object a line."""
    level: Annotated[LogLevel, Field(strict=False)] = LogLevel.INFO
    """Least important lines that are written. `debug` has several lines for every request."""

    @property
    def style(self) -> LogStyle:
        """The style as a process's log takes it."""
        return LogStyle(self.format == LogFormat.JSON, getattr(logging, self.level.upper()))
