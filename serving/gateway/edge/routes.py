"""The routes of a gateway: those that models answer, and its own.

What is not here is not served. vLLM registers more (scaling, adapters, profiling), which are
operations on a server of its own and not for whoever holds an API key. Pure.
"""

import re
from collections.abc import Mapping

from serving.config.api_keys import KeyScope, ModelRoute

MODEL_ROUTES = frozenset(ModelRoute)

GENERATE_ROUTES = frozenset(
    {
        ModelRoute.CHAT_COMPLETIONS,
        ModelRoute.COMPLETIONS,
        ModelRoute.RESPONSES,
        ModelRoute.MESSAGES,
    }
)

# Whose clients read errors in Anthropic's form.
ANTHROPIC_ROUTES = frozenset({ModelRoute.MESSAGES, ModelRoute.COUNT_TOKENS})

# Routes whose streams number their events.
NUMBERED_ROUTES = frozenset({ModelRoute.RESPONSES})

# Routes of `MODEL_ROUTES` that no engine is needed for.
ENGINELESS_ROUTES = frozenset({ModelRoute.TOKENIZE, ModelRoute.DETOKENIZE, ModelRoute.COUNT_TOKENS})

HEALTH = "/health"
# Asked by every load balancer and kubelet every few seconds, so it is neither counted nor logged.
READY = "/ready"
MODELS = "/v1/models"
ONE_MODEL = "/v1/models/{model}"
METRICS = "/metrics"
FLEET = "/fleet"
FLEET_HISTORY = "/fleet/history"
ONE_REQUEST = "/fleet/requests/{request_id}"
API_DESCRIPTION = "/openapi.json"

FILES = "/v1/files"
ONE_FILE = "/v1/files/{file_id}"
FILE_CONTENT = "/v1/files/{file_id}/content"
BATCHES = "/v1/batches"
ONE_BATCH = "/v1/batches/{batch_id}"
CANCEL_BATCH = "/v1/batches/{batch_id}/cancel"

# The routes of the batch lane with their methods. A key for them is one for inference.
BATCH_ROUTES: Mapping[str, tuple[str, ...]] = {
    FILES: ("GET", "POST"),
    ONE_FILE: ("GET", "DELETE"),
    FILE_CONTENT: ("GET",),
    BATCHES: ("GET", "POST"),
    ONE_BATCH: ("GET",),
    CANCEL_BATCH: ("POST",),
}
_WITH_ID = {
    re.compile(re.sub(r"\{.+\}", "([^/]+)", route)): route for route in BATCH_ROUTES if "{" in route
}

# The gateway's own routes, all of them read by GET; and what a key has to be for. `None`: any key.
OWN_ROUTES: Mapping[str, KeyScope | None] = {
    HEALTH: None,
    MODELS: KeyScope.INFERENCE,
    ONE_MODEL: KeyScope.INFERENCE,
    METRICS: KeyScope.METRICS,
    FLEET: KeyScope.FLEET,
    FLEET_HISTORY: KeyScope.FLEET,
    ONE_REQUEST: KeyScope.FLEET,
    API_DESCRIPTION: None,
}

MODEL_METHODS = ("POST",)
OWN_METHODS = ("GET", "HEAD")


def route_of(path: str) -> str | None:
    """Returns the route that a path belongs to, as it is written here; `None` if there is none."""
    if path in MODEL_ROUTES or path in OWN_ROUTES or path == READY:
        return path
    for route in (ONE_MODEL, ONE_REQUEST):
        if part_of(path, route):
            return route
    return batch_route_of(path)[0] or None


def batch_route_of(path: str) -> tuple[str, str]:
    """Returns the route of the batch lane that a path belongs to, and the id in it.

    What there is none of is empty.
    """
    if path in BATCH_ROUTES:
        return path, ""
    for form, route in _WITH_ID.items():
        if found := form.fullmatch(path):
            return route, found[1]
    return "", ""


def part_of(path: str, route: str) -> str:
    """Returns what a path has in place of a route's last, named part; empty if it is no such."""
    above = route[: route.index("{")]
    return path.removeprefix(above) if path.startswith(above) else ""


def methods_of(route: str) -> tuple[str, ...]:
    """Returns the methods of a route."""
    if route in BATCH_ROUTES:
        return BATCH_ROUTES[route]
    return MODEL_METHODS if route in MODEL_ROUTES else OWN_METHODS
