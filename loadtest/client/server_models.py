"""The models that a server lists."""

import json
import urllib.request
from collections.abc import Sequence

from loadtest.errors import LoadTestError

_TIMEOUT_S = 10.0


def choose_models(url: str, api_key: str | None, requested: Sequence[str]) -> tuple[str, ...]:
    """Returns those asked for, in the order asked; all base models if none is.

    An adapter is a model with a parent; it is only chosen by name.

    Raises:
        LoadTestError: the server does not answer, or has no such model.
    """
    cards = _cards(url, api_key)
    if not requested:
        chosen = tuple(name for name, parent in cards.items() if parent is None)
        if not chosen:
            raise LoadTestError(f"{url} serves no model")
        return chosen
    unknown = [name for name in requested if name not in cards]
    if unknown:
        msg = f"model={', '.join(unknown)} is not served; allowed: {', '.join(sorted(cards))}"
        raise LoadTestError(msg)
    return tuple(requested)


def _cards(url: str, api_key: str | None) -> dict[str, object]:
    """Returns names, with the parent of each."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(url.rstrip("/") + "/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return {card["id"]: card.get("parent") for card in json.load(response)["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadTestError(f"{url}/v1/models cannot be read: {error!r}") from error
