"""Defines what can go wrong between the plan and the slices, and what the caller is to do.

SlicewiseError
└── ProvisioningError
    ├── RecordsUnavailableError  the directory does not answer: plan nothing, ask again
    ├── RefusedError             401, 403: grant the permission it names; asked again, slowly
    ├── MissingError             404: no such object; correct the name, or wait for it
    ├── OutdatedError            409, 422: it changed meanwhile: read again and plan anew
    ├── ExpiredError             410: the version to go on from is too old: list anew
    ├── ThrottledError           429: wait `retry_after_s`, then the same again
    ├── UnreachableError         5xx, no connection, no answer in time: back off, try again
    └── UnusableError            an answer that is not what it should be: give up on it, alert
"""

from serving.domain.errors import SlicewiseError


class ProvisioningError(SlicewiseError):
    """Reports a failed attempt. `retry_after_s` is the delay in the answer, else `None`."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """Returns what failed, and how."""
        return self.message


class RecordsUnavailableError(ProvisioningError):
    """The replicas' records cannot be read. Without them nothing may be planned."""


class RefusedError(ProvisioningError):
    """The service account may not do this. The message names verb and object."""


class MissingError(ProvisioningError):
    """The object does not exist, or no longer."""


class OutdatedError(ProvisioningError):
    """The object is not what the change was planned for. Read again and plan anew."""


class ExpiredError(ProvisioningError):
    """The server no longer has the version that a list or a watch was to go on from. List anew."""


class ThrottledError(ProvisioningError):
    """Reports too many requests. Wait as long as the answer requests."""


class UnreachableError(ProvisioningError):
    """The other side is down, or overloaded, or the network between is. Back off."""


class UnusableError(ProvisioningError):
    """The answer is not of the expected form: another API, a proxy, or a version we do not know."""
