"""How a failure of the fleet goes through vLLM's frontend to the client."""

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from serving.domain.errors import RequestError


class FleetRequestError(GracefulHTTPError):
    """Carries a `RequestError` through vLLM.

    vLLM writes it into a stream that has begun. Before that, the edge answers with the error.
    """

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
