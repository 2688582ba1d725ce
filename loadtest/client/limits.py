"""Limits how long a client waits and how often it tries."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(BaseModel):
    """The limits of each request.

    `connect_s` bounds the making of a connection, `silence_s` the time between two reads of it,
    `request_s` a request with all its attempts. Only refusals for load (429 and 503) are tried
    again, at most `max_retries` times, after the delay in `Retry-After` if that is at most
    `max_retry_after_s`; otherwise the refusal stands.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    connect_s: _Seconds = 10.0
    silence_s: _Seconds = 60.0
    request_s: _Seconds = 600.0
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    max_retry_after_s: _Seconds = 30.0
