"""vLLM's records of bodies are refused at their first fault, and are else what vLLM reads.

A list of wrong items costs the event loop what its first one costs, however long it is.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from vllm.exceptions import VLLMClientError

from serving.config.application import GatewayConfig
from serving.gateway.edge.fields import is_large
from serving.gateway.forks.bodies.sizes import LARGE_NAMES
from serving.gateway.model_version import ModelVersion
from tests.hostile.cases import ROUTES, Route, some_cases

from .test_forged_resume import CONFIG

pytestmark = pytest.mark.imports_vllm

# The faults of one item: as many as there are kinds of things that it might have been.
MOST_FAULTS = 400
# vLLM's validators refuse by errors of their own, some by accident.
TOLD_AT_ONCE = (VLLMClientError, ValueError, TypeError, AttributeError)
WRONG = ["1", "1.5", "null", '""', "[]", "{}", '{"type": "message", "content": [1, 1]}']


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with asyncio.Runner() as runner:
        version = runner.run(ModelVersion.build(CONFIG, GatewayConfig()))
        built = runner.run(version.app())
        assert isinstance(built, FastAPI)
        yield built
        runner.run(version.wait_closed())


def faults(app: FastAPI, path: str, body: Any) -> list[Any]:
    """What the route's own reader finds, as FastAPI asks it."""
    (route,) = (each for each in app.routes if isinstance(each, APIRoute) and each.path == path)
    assert route.body_field is not None
    with contextlib.suppress(*TOLD_AT_ONCE):
        return route.body_field.validate(body)[1]
    return []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_items_have_no_more_faults_than_one(app: FastAPI, route: Route, wrong: str) -> None:
    fields = route.body if route.model is None else route.model.model_fields
    for field in fields:
        for value in (f"[{wrong}]", f'[{{"role": "user", "content": [{wrong}]}}]'):
            one = {**route.body, field: json.loads(value)}
            many = {**route.body, field: json.loads(value.replace(wrong, ", ".join([wrong] * 500)))}
            found = len(faults(app, route.path, many))
            assert found <= max(MOST_FAULTS, len(faults(app, route.path, one))), field


def test_choices_have_no_more_faults_than_one(app: FastAPI) -> None:
    route = next(each for each in ROUTES if each.path == "/v1/completions")
    body = {**route.body, "structured_outputs": {"choice": [1] * 500}}
    assert len(faults(app, route.path, body)) == 1


def test_what_is_refused_and_how_it_begins_is_as_in_vllm(app: FastAPI) -> None:
    num_refused = 0
    for case in some_cases(4_000, seed=4):
        if case.route.model is None:
            continue
        try:
            body = json.loads(case.text())
        except (ValueError, RecursionError):
            continue
        first = None
        try:
            TypeAdapter(case.route.model).validate_python(body, from_attributes=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        except TOLD_AT_ONCE:
            continue
        found = faults(app, case.path, json.loads(case.text()))
        num_refused += bool(found)
        assert bool(found) == (first is not None), str(case)
        if first is not None:
            assert (found[0]["type"], tuple(found[0]["loc"])) == (first["type"], first["loc"])
    assert num_refused > 1_000


@pytest.mark.parametrize("space", ["", " "])
def test_object_of_many_names_is_read_in_a_fork(space: str) -> None:
    names = ",".join(f'"{number}"{space}:1' for number in range(LARGE_NAMES + 1))
    body = f'{{"model":"demo","prompt":"A","logit_bias":{{{names}}}}}'.encode()
    assert is_large("/v1/completions", body)
    assert not is_large("/v1/completions", body[: len(body) // 2])
