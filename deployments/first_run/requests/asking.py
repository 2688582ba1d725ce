"""Asks the application: single requests, streams side by side, and its metrics.

A stream keeps its tokens with the likeliest others at each, so that two answers can be compared,
and the times at which they came.
"""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.first_run.application import API_KEY_VARIABLE

COMPLETIONS = "/v1/completions"
_NUM_ALTERNATIVES = 2
_TOKEN_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer to one request. `status` of 0: there was none, and `body` has the reason."""

    status: int
    body: dict[str, Any]
    wall_s: float

    def complaint(self) -> str:
        """Returns the reason of an error in a few words."""
        error = self.body.get("error", self.body)
        message = error.get("message", error) if isinstance(error, dict) else error
        return f"{self.status}: {str(message)[:200]}"


@dataclass(slots=True)
class StreamedAnswer:
    """One stream as its client saw it. `error` of `None`: it ended as it should."""

    tokens: list[int] = field(default_factory=list)
    alternatives: list[dict[int, float]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)  # monotonic, one a token
    error: str | None = "no end came"

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two tokens; 0 with fewer than two."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


def ask(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> HttpAnswer:
    """Sends one request and returns its answer, whatever it is."""
    began_s = time.monotonic()
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), _headers())
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        return HttpAnswer(0, {"error": f"{error}"}, time.monotonic() - began_s)
    try:
        found = json.loads(text)
    except ValueError:
        found = {"error": text.decode(errors="replace")[:500]}
    found = found if isinstance(found, dict) else {"error": str(found)}
    return HttpAnswer(status, found, time.monotonic() - began_s)


def metric_sum(url: str, name: str, timeout_s: float = 10.0) -> float | None:
    """Returns the sum of a series over its labels; `None` where it is not told."""
    request = urllib.request.Request(f"{url}/metrics", headers=_headers())
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]
    return sum(values) if values else None


def greedy(
    model: str, prompt: str, num_tokens: int, *, has_alternatives: bool = True
) -> dict[str, Any]:
    """Returns a request for the likeliest tokens, as many as are asked for.

    With `has_alternatives` each comes with the likeliest others, which a paced engine has not.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    return body | {"logprobs": _NUM_ALTERNATIVES} if has_alternatives else body


class Streams:
    """Greedy streams side by side, each in a thread of its own, one for each prompt."""

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[str],
        num_tokens: int,
        timeout_s: float,
        *,
        has_alternatives: bool = True,
    ) -> None:
        """Sends all; `has_alternatives` is of `greedy`."""
        self.answers = [StreamedAnswer() for _ in prompts]
        bodies = [
            greedy(model, prompt, num_tokens, has_alternatives=has_alternatives)
            for prompt in prompts
        ]
        self._threads = [
            threading.Thread(
                target=_stream,
                args=(url, body, answer, timeout_s),
                daemon=True,
            )
            for body, answer in zip(bodies, self.answers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_begun(self, until_s: float) -> bool:
        """Waits until each has a token, or has ended; returns whether that came in time."""
        while not all(answer.tokens or answer.error is None for answer in self.answers):
            if time.monotonic() > until_s or self.are_over:
                return False
            time.sleep(0.01)
        return True

    @property
    def are_over(self) -> bool:
        """True once none runs any more."""
        return not any(map(threading.Thread.is_alive, self._threads))

    def wait(self, until_s: float) -> list[StreamedAnswer]:
        """Waits for their ends; what is not over at `until_s` (monotonic) has its error."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return self.answers


def _stream(url: str, body: dict[str, Any], answer: StreamedAnswer, timeout_s: float) -> None:
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{url}{COMPLETIONS}", data, _headers())
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            for event in _events(response):
                if event is None:
                    answer.error = None
                    return
                if "error" in event:
                    answer.error = str(event["error"])[:300]
                    return
                _add(answer, event["choices"])
        answer.error = f"the stream was cut after {len(answer.tokens)} tokens"
    except urllib.error.HTTPError as error:
        answer.error = f"{error.code}: {error.read()[:200].decode(errors='replace')}"
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"


def _events(response: Any) -> Iterator[dict[str, Any] | None]:
    """Yields the events of a stream; `None` for its proper end."""
    for line in response:
        if line.startswith(b"data: "):
            text = line[len(b"data: ") :].strip()
            yield None if text == b"[DONE]" else json.loads(text)


def _add(answer: StreamedAnswer, choices: Sequence[Mapping[str, Any]]) -> None:
    now_s = time.monotonic()
    for choice in choices:
        tokens = choice.get("token_ids") or []
        answer.tokens += tokens
        answer.arrivals_s += [now_s] * len(tokens)
        tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
        answer.alternatives += [
            {int(name.removeprefix(_TOKEN_PREFIX)): value for name, value in (top or {}).items()}
            for top in tops
        ]


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(API_KEY_VARIABLE)
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})
