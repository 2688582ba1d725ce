"""What can go wrong between the plan and the slices, and what the caller is to do.

SlicewiseError
└── ProvisioningError
    ├── RecordsUnavailableError  the directory does not answer: plan nothing, ask again
    ├── RefusedError             401, 403: grant the permission it names; asked again, slowly
    ├── MissingError             404: no such object; correct the name, or wait for it
    ├── OutdatedError            409, 422: it changed meanwhile: look again and plan anew
    ├── ThrottledError           429: wait `retry_after_s`, then the same again
    ├── UnreachableError         5xx, no connection, no answer in time: back off, try again
    └── UnusableError            an answer that is not what it should be: give up on it, alert
"""

from serving.domain.errors import SlicewiseError


class ProvisioningError(SlicewiseError):
    """One attempt failed. `retry_after_s` is what the other side asked for, `None` if nothing."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """What failed, and how."""
        return self.message


class RecordsUnavailableError(ProvisioningError):
    """The replicas' records cannot be read. Without them nothing may be planned."""


class RefusedError(ProvisioningError):
    """The service account may not do this. The message names verb and object."""


class MissingError(ProvisioningError):
    """The object does not exist, or no longer."""


class OutdatedError(ProvisioningError):
    """The object is not what the change was planned for. Look again and plan anew."""


class ThrottledError(ProvisioningError):
    """Too many requests. Wait as long as the answer says."""


class UnreachableError(ProvisioningError):
    """The other side is down, or overloaded, or the network between is. Back off."""


class UnusableError(ProvisioningError):
    """The answer is not of the expected form: another API, a proxy, or a version we do not know."""
