"""Asks a gateway for what it shows to operators. Owns the request and the words of its failures."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Container
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar="SLICEWISE_API_KEY", help="API key, where the gateway wants one."),
]


class FleetUnavailableError(Exception):
    """What a gateway shows could not be read; the message names cause and fix."""


def fetch_fleet(url: str, api_key: str | None, timeout_s: float) -> str:
    """The JSON text of `/fleet`.

    Raises:
        FleetUnavailableError: nothing answers there, or not with the fleet.
    """
    return _fetch(url, "/fleet", api_key, timeout_s)


def fetch_story(url: str, request_id: str, api_key: str | None, timeout_s: float) -> str:
    """The JSON text of what a gateway knows of a request, or of its error that it knows nothing.

    Raises:
        FleetUnavailableError: nothing answers there, or no gateway that has such a route.
    """
    path = f"/fleet/requests/{quote(request_id, safe='')}"
    return _fetch(url, path, api_key, timeout_s, error_statuses=(404,))


def fetch_batches(url: str, limit: int, api_key: str | None, timeout_s: float) -> str:
    """The JSON text of the newest batches of the key's tenant.

    Raises:
        FleetUnavailableError: nothing answers there, or no gateway that serves batches.
    """
    path = f"/v1/batches?limit={limit}"
    body = _fetch(url, path, api_key, timeout_s, error_statuses=(403, 404))
    if (refusal := _refusal_in(body)) is not None:
        raise FleetUnavailableError(f"{url} refuses: {refusal}")
    return body


def _refusal_in(body: str) -> str | None:
    """Returns why a gateway refused; `None` if it did not."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _fetch(
    url: str,
    path: str,
    api_key: str | None,
    timeout_s: float,
    error_statuses: Container[int] = (),
) -> str:
    """The text that a gateway answers, over a connection of its own.

    Raises:
        FleetUnavailableError: nothing answers there, or with a status of an error that is not in
            `error_statuses`.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise FleetUnavailableError(f"not an address: {url!r}; allowed: such as {DEFAULT_URL}")
    address = f"{url.rstrip('/')}{path}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(address, headers=headers)
    try:
        with _open(request, timeout_s, error_statuses) as response:
            body: bytes = response.read()
            return body.decode("utf-8")
    except urllib.error.HTTPError as error:
        error.close()
        raise FleetUnavailableError(_describe_status(address, error.code)) from error
    # A timeout while the body is read, unlike one before it, is not a URLError.
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", error)
        raise FleetUnavailableError(
            f"cannot read {address}: {reason}; is `serve run serve_config.yaml` running there?"
        ) from error


def _open(request: urllib.request.Request, timeout_s: float, error_statuses: Container[int]) -> Any:
    try:
        return _OPENER.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code in error_statuses:
            return error  # it is read as an answer is
        raise


def _describe_status(address: str, status: int) -> str:
    if status == 401:
        return f"{address} wants an API key: give --api-key, or set SLICEWISE_API_KEY"
    if 300 <= status < 400:
        return f"{address} redirects (HTTP {status}); give the gateway's own address with --url"
    return f"{address} answered HTTP {status}; is that address a Slicewise gateway?"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows none: a redirect would carry the API key to another address."""

    def redirect_request(self, *_args: object, **_keywords: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect())
