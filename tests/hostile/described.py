"""Requests made from `/openapi.json`, of what it describes and of what it does not, and a verdict.

schemathesis makes them; the same seed makes the same ones.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from .cases import MODEL, ROUTES
from .outcomes import is_error_of_ours

NUM_AT_ONCE, PATIENCE_S = 16, 60.0
_WRITTEN = 300
# Fields of one request that are put into a body which is answered without them.
MOST_GRAFTED = 3


@dataclass(frozen=True, slots=True)
class DescribedRequest:
    """One request at an operation of the description, `content` as it goes over the wire.

    `is_grafted` if all but some fields of it is a body that the route answers.
    """

    path: str
    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    is_grafted: bool = False


@dataclass(frozen=True, slots=True)
class DescribedOutcome:
    """A request, the status of its answer (0: none came), and what is wrong with the answer."""

    request: DescribedRequest
    status: int
    fault: str | None

    def __str__(self) -> str:
        """Returns a line that is enough to send it again."""
        sent = self.request
        body = (sent.content or b"")[:_WRITTEN]
        return f"{sent.method} {sent.url} {body!r} {self.status}: {self.fault}"


def requests_of(
    description: Mapping[str, Any], num_each: int, number: int
) -> list[DescribedRequest]:
    """Returns up to `num_each` valid and as many invalid requests of each operation.

    `number` seeds the choice. An operation that takes nothing has one request. Few that are valid
    by the description come to an engine, so of each some fields are also put into the body of
    `ROUTES`, which is answered.
    """
    import schemathesis

    schema = schemathesis.openapi.from_dict(dict(description))
    made: list[DescribedRequest] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(number)
            @settings(
                max_examples=num_each,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def take(case: Any) -> None:
                made.append(_request_of(case))

            try:
                take()
            except Unsatisfiable:
                continue  # nothing that it takes can be wrong
    return [*made, *_grafted(made, random.Random(number))]


def _grafted(made: Sequence[DescribedRequest], chance: random.Random) -> Iterator[DescribedRequest]:
    bodies = {route.path: route.body for route in ROUTES}
    for request in made:
        fields = _fields_in(request.content) if request.path in bodies else {}
        if fields:
            names = chance.sample(list(fields), min(len(fields), chance.randint(1, MOST_GRAFTED)))
            body = {**bodies[request.path], **{name: fields[name] for name in names}}
            content = json.dumps(body | {"model": MODEL}).encode()
            yield replace(request, content=content, is_grafted=True)


def _fields_in(content: bytes | None) -> dict[str, Any]:
    try:
        fields = json.loads(content or b"")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _request_of(case: Any) -> DescribedRequest:
    sent = case.as_transport_kwargs(base_url="")
    content = sent.get("data")
    if "json" in sent:
        content = json.dumps(sent["json"]).encode()
    request = httpx.Request(
        sent["method"],
        f"http://gateway{sent['url']}",
        params=sent.get("params"),
    )
    given = {name.lower(): value for name, value in dict(sent.get("headers") or {}).items()}
    # Drawn anew in each process, whatever the seed.
    given.pop("x-schemathesis-testcaseid", None)
    headers = {"content-type": "application/json"} | given
    content = content.encode() if isinstance(content, str) else content
    url = request.url.raw_path.decode("ascii")
    return DescribedRequest(case.operation.path, sent["method"], url, headers, content)


class Verdict:
    """Says what is wrong with an answer, by the description."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._description = description

    def fault(self, request: DescribedRequest, answer: httpx.Response) -> str | None:
        """Returns the first fault of an answer; `None` if it is as described."""
        status = answer.status_code
        if status >= 500 and not (status == 503 and "retry-after" in answer.headers):
            return f"an error of ours: {answer.text[:_WRITTEN]}"
        operation = self._description["paths"][request.path][request.method.lower()]
        described = operation["responses"].get(str(status))
        if described is None:
            return f"a status that is not described: {answer.text[:_WRITTEN]}"
        content = described.get("content")
        if content is None:
            return None
        kind = answer.headers.get("content-type", "").partition(";")[0].strip()
        if kind not in content:
            return f"{kind!r} is not one of {', '.join(content)}: {answer.text[:_WRITTEN]}"
        if kind == "text/event-stream":
            return f"broke off: {answer.text[-_WRITTEN:]}" if is_error_of_ours(answer) else None
        return self._misfit(answer, content[kind].get("schema", {})) if "json" in kind else None

    def _misfit(self, answer: httpx.Response, schema: Mapping[str, Any]) -> str | None:
        whole = {**schema, "components": self._description["components"]}
        try:
            jsonschema.validate(answer.json(), whole, cls=jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"no answer as described: {str(error)[:_WRITTEN]}"
        return None


async def outcomes_of_described(
    base_url: str, description: Mapping[str, Any], requests: Sequence[DescribedRequest]
) -> list[DescribedOutcome]:
    """Sends all, a few at once."""
    places = asyncio.Semaphore(NUM_AT_ONCE)
    verdict = Verdict(description)

    async def one(client: httpx.AsyncClient, request: DescribedRequest) -> DescribedOutcome:
        async with places:
            try:
                answer = await client.request(
                    request.method, request.url, headers=request.headers, content=request.content
                )
            except httpx.HTTPError as error:
                return DescribedOutcome(request, 0, repr(error))
            fault = verdict.fault(request, answer)
            return DescribedOutcome(request, answer.status_code, fault)

    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(one(client, request) for request in requests))


def lines_of(outcomes: Sequence[DescribedOutcome]) -> Iterator[str]:
    """Yields lines that say how they ended, by operation and status."""
    counts = Counter((each.request.path, each.status) for each in outcomes)
    for (path, status), number in sorted(counts.items()):
        yield f"{path} {status}: {number}"
    num_faults = sum(each.fault is not None for each in outcomes)
    share = f"{share_answered(outcomes):.0%} of those that are nearly as they should be"
    yield f"{len(outcomes)} requests, {num_faults} faults; answered: {share}"


def share_answered(outcomes: Sequence[DescribedOutcome]) -> float:
    """Returns the share of grafted requests with status 200, 0 to 1."""
    grafted = [each for each in outcomes if each.request.is_grafted]
    return sum(each.status == 200 for each in grafted) / max(1, len(grafted))
