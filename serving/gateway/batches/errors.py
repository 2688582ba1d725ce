"""The refusals of the batch lane's routes, beside those of `serving.domain.errors`."""

from serving.domain.errors import RequestError


class BatchesOffError(RequestError):
    """No place for batches is set up here."""

    status = 404
    code = "batches_off"

    def __init__(self) -> None:
        super().__init__()
        self.message = (
            "Batches are not served here; an operator sets batches.folder or batches.store."
        )


class UnknownObjectError(RequestError):
    """The tenant has no such file or batch, or no more."""

    status = 404
    code = "not_found"
    repeats_request = True

    def __init__(self, kind: str, object_id: str, param: str | None = None) -> None:
        super().__init__(kind, object_id, param)
        self.param = param
        self.message = f"There is no {kind} {object_id[:100]!r} of yours."


class ObjectStateError(RequestError):
    """The file or batch cannot be changed as it is now."""

    status = 409
    code = "conflict"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class FileTooLargeError(RequestError):
    """The file is larger than one may be."""

    status = 413
    code = "file_too_large"
    param = "file"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.message = f"The file is larger than the {max_bytes} bytes allowed."


class StorageFullError(RequestError):
    """The files of the tenant are as large as they may be. It has to delete some."""

    status = 413
    code = "storage_full"
    param = "file"

    def __init__(self, num_bytes: int, max_bytes: float) -> None:
        super().__init__(num_bytes, max_bytes)
        self.message = (
            f"Your files have {num_bytes} of the {max_bytes:.0f} bytes that they may have "
            "together; delete some."
        )


class TooManyBatchesError(RequestError):
    """As many batches of the tenant as may have not ended. It has to wait, or to cancel some."""

    status = 429
    kind = "rate_limit_error"
    code = "too_many_batches"

    def __init__(self, num_open: int, most: float) -> None:
        super().__init__(num_open, most)
        self.message = (
            f"{num_open} of your batches have not ended, of {most:.0f} that may "
            "(batches.max_tenant_batches); try again when one has, or cancel one."
        )


class TooManyUploadsError(RequestError):
    """As many files come in at this gateway as it takes at once, of all or of a tenant. Retry."""

    status = 503
    kind = "overloaded_error"
    code = "too_many_uploads"
    retry_after_s = 5.0

    def __init__(self, which: str) -> None:
        super().__init__(which)
        self.message = (
            f"{which} are being uploaded to this gateway; retry in {self.retry_after_s:.0f} s."
        )


class StoreUnavailableError(RequestError):
    """The store of the batch lane cannot be read or written now. Retry."""

    status = 503
    kind = "server_error"
    code = "store_unavailable"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.message = f"The store of batches fails; retry in {self.retry_after_s:.0f} s."
