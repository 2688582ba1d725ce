"""The dashboard's answers to a browser: the page, its parts and the history.

Owns which path gives what, and the form of a refusal. Does not own who may ask: the gateway has
checked the key. Pure.
"""

import msgspec

from serving.dashboard.history import History
from serving.dashboard.history_page import history_answer
from serving.dashboard.page import page_answers
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import MalformedRequestError, RequestError, openai_error_body


class DashboardPages:
    """Answers requests for the page, its parts and the history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._answers = page_answers()

    def answer(self, request: PageRequest) -> PageAnswer:
        """Returns the answer to a request, which may be an error."""
        try:
            if request.path == "/fleet/history":
                return history_answer(self._history, request.query, request.if_none_match)
            page = self._answers.get(request.path)
            if page is None:
                message = f"There is no route {request.path}."
                error = MalformedRequestError(message, code="not_found")
                return _refusal(error, status=404)
        except RequestError as error:
            return _refusal(error, error.status)
        return page


def _refusal(error: RequestError, status: int) -> PageAnswer:
    body = msgspec.json.encode(openai_error_body(error))
    return PageAnswer(status, body, {"content-type": "application/json"})
