"""Describes in OpenAPI's form what a gateway serves to the holder of a key, and nothing else.

What requests look like is vLLM's word, in `vllm_api.json` (`scripts/describe_api.py` writes it).
Which of its routes are served, for which models, with which fields, is decided here. Pure, but for
the reading of that file, once.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from serving.config.api_keys import KeyRecord, KeyScope
from serving.config.application import OpenField
from serving.gateway.edge import routes
from serving.gateway.edge.auth import may_use

# A JSON document. Any, because JSON nests arbitrarily.
Json = dict[str, Any]

_IN_PATH = re.compile(r"\{(.+)\}")
_REFERENCE = re.compile(r"#/components/schemas/(.+)")
_ERRORS = {
    "400": "The request cannot be understood, or asks for what is not allowed",
    "401": "No API key, or one that is unknown or has ended",
    "403": "The API key is not for this",
    "404": "There is no such model, or it does not answer here",
    "409": "It cannot be changed as it is now",
    "413": "The body is too long",
    "429": "Too many requests wait; retry after the stated time",
    "500": "The request failed and is not to be repeated",
    "503": "No engine took the request in time; retry after the stated time",
}
_MODEL_ERRORS = _ERRORS.keys() - {"409"}
_OPENAI_ERROR = "Error"
_ANTHROPIC_ERROR = "AnthropicError"
_TEXT = {"type": "string"}
_ERROR_SCHEMAS: Json = {
    _OPENAI_ERROR: {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
            }
        },
    },
    _ANTHROPIC_ERROR: {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
}
_CARD: Json = {
    "type": "object",
    "required": ["id", "object"],
    "properties": {"id": _TEXT, "object": {"const": "model"}},
}
_CARDS: Json = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}},
}
# The summary of each of our own routes, the type of its answer, and its schema where it has one.
_OWN: Mapping[str, tuple[str, str, Json]] = {
    routes.HEALTH: ("Whether this gateway works", "text/plain", {}),
    routes.READY: ("Whether requests can be answered", "text/plain", {}),
    routes.MODELS: ("The models that may be asked", "application/json", _CARDS),
    routes.ONE_MODEL: ("One of them", "application/json", _CARD),
    routes.METRICS: ("Metrics, for Prometheus", "text/plain", {}),
    routes.FLEET: ("The slices and engines", "application/json", {"type": "object"}),
    routes.FLEET_HISTORY: ("What they were", "application/json", {}),
    routes.ONE_REQUEST: (
        "Why a request went where it went, as the gateway that had it knows",
        "application/json",
        {"type": "object"},
    ),
    routes.API_DESCRIPTION: ("This description", "application/json", {"type": "object"}),
}


_BATCH_STATUSES = ("400", "401", "403", "404", "409", "413", "503")
_FILE_FORM: Json = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": _TEXT},
        }
    }
}
_NEW_BATCH: Json = {
    "application/json": {
        "schema": {
            "type": "object",
            "required": ["input_file_id", "endpoint", "completion_window"],
            "properties": {
                "input_file_id": _TEXT,
                "endpoint": _TEXT,
                "completion_window": _TEXT,
                "metadata": {"type": ["object", "null"], "additionalProperties": _TEXT},
                "output_expires_after": {"type": ["object", "null"]},
            },
            "additionalProperties": False,
        }
    }
}
# The summary and the body of each operation of the batch lane.
_BATCH: Mapping[str, Mapping[str, tuple[str, Json | None]]] = {
    routes.FILES: {"get": ("Your files", None), "post": ("Upload one", _FILE_FORM)},
    routes.ONE_FILE: {"get": ("One of them", None), "delete": ("Delete it", None)},
    routes.FILE_CONTENT: {"get": ("What is in it", None)},
    routes.BATCHES: {"get": ("Your batches", None), "post": ("Begin one", _NEW_BATCH)},
    routes.ONE_BATCH: {"get": ("How far it is", None)},
    routes.CANCEL_BATCH: {"post": ("End it early", None)},
}


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """One model: the names that select it, adapters' included, and the routes that it answers."""

    names: tuple[str, ...]
    routes: frozenset[str]


def describe_api(
    models: Iterable[DescribedModel],
    holder: KeyRecord,
    open_fields: frozenset[OpenField],
    *,
    needs_key: bool,
    has_batches: bool = False,
) -> Json:
    """Returns the description of what the holder of a key may ask, as a new document.

    Requests name only models that are served and that the key is for. Fields that steer engines are
    not among theirs unless they are in `open_fields`. `has_batches`: the batch lane's routes too.
    """
    served = _served(models, holder)
    may_batch = has_batches and KeyScope.INFERENCE in holder.scopes
    batch_paths = dict(_batch_paths()) if may_batch else {}
    described: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Slicewise", "version": f"vLLM {_vllm()['vllm']}"},
        "paths": dict(_model_paths(served)) | dict(_own_paths(holder)) | batch_paths,
        "components": {"schemas": _schemas(served, open_fields) | _ERROR_SCHEMAS},
    }
    if needs_key:
        described["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "anthropic": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        described["security"] = [{"key": []}, {"anthropic": []}]
    return described


def _served(models: Iterable[DescribedModel], holder: KeyRecord) -> dict[str, list[str]]:
    """Returns the names that may be asked for, by the routes at which they may."""
    if KeyScope.INFERENCE not in holder.scopes:
        return {}
    served: dict[str, list[str]] = {}
    for model in models:
        names = [name for name in model.names if may_use(holder, name)]
        for route in sorted(model.routes & routes.MODEL_ROUTES):
            if names and (holder.routes is None or route in holder.routes):
                served.setdefault(route, []).extend(names)
    return dict(sorted(served.items()))


def _model_paths(served: Iterable[str]) -> Iterator[tuple[str, Json]]:
    for route in served:
        described = _vllm()["routes"][route]
        content: Json = {"application/json": {"schema": {}}}
        if described["streams"]:
            content["text/event-stream"] = {}
        statuses = sorted({*_MODEL_ERRORS, *described["statuses"]})
        error = _ANTHROPIC_ERROR if route in routes.ANTHROPIC_ROUTES else _OPENAI_ERROR
        operation = {
            "summary": described["summary"],
            "operationId": f"post {route}",
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": described["request"]}},
            },
            "responses": {"200": {"description": "The answer", "content": content}}
            | {status: _error(status, error) for status in statuses},
        }
        yield route, {"post": operation}


def _own_paths(holder: KeyRecord) -> Iterator[tuple[str, Json]]:
    for route, (summary, media_type, schema) in _OWN.items():
        scope = routes.OWN_ROUTES.get(route)
        if scope is not None and scope not in holder.scopes:
            continue
        content = {media_type: {"schema": schema}}
        operation: Json = {
            "summary": summary,
            "operationId": f"get {route}",
            "responses": {"200": {"description": "The answer", "content": content}},
        }
        if route in (routes.HEALTH, routes.READY):
            operation["security"] = []
            operation["responses"]["503"] = {"description": "It is not so, with the reason"}
        else:
            operation["responses"] |= {
                status: _error(status, _OPENAI_ERROR) for status in ("401", "403", "404", "503")
            }
        if (name := _IN_PATH.search(route)) is not None:
            operation["parameters"] = [
                {"name": name[1], "in": "path", "required": True, "schema": _TEXT}
            ]
        yield route, {"get": operation}


def _batch_paths() -> Iterator[tuple[str, Json]]:
    for route, operations in _BATCH.items():
        described: Json = {}
        for method, (summary, body) in operations.items():
            is_content = route == routes.FILE_CONTENT
            media_type = "application/octet-stream" if is_content else "application/json"
            content = {media_type: {"schema": {} if is_content else {"type": "object"}}}
            operation: Json = {
                "summary": summary,
                "operationId": f"{method} {route}",
                "responses": {"200": {"description": "The answer", "content": content}}
                | {status: _error(status, _OPENAI_ERROR) for status in _BATCH_STATUSES},
            }
            if body is not None:
                operation["requestBody"] = {"required": True, "content": body}
            if (name := _IN_PATH.search(route)) is not None:
                operation["parameters"] = [
                    {"name": name[1], "in": "path", "required": True, "schema": _TEXT}
                ]
            described[method] = operation
        yield route, described


def _error(status: str, schema: str) -> Json:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": _ERRORS.get(status, "The request failed"), "content": content}


def _schemas(served: Mapping[str, Iterable[str]], open_fields: frozenset[OpenField]) -> Json:
    """Returns the schemas that the requests of these routes need."""
    whole: Json = _vllm()["schemas"]
    schemas: Json = {}
    for route, names in served.items():
        request = _vllm()["routes"][route]["request"]
        for name in _references(request):
            before = schemas[name]["properties"]["model"]["enum"] if name in schemas else ()
            schemas[name] = _request(whole[name], {*names, *before}, open_fields)
    pending = [name for schema in schemas.values() for name in _references(schema)]
    while pending:
        name = pending.pop()
        if name not in schemas:
            schemas[name] = whole[name]
            pending += _references(whole[name])
    return schemas


def _request(schema: Json, names: Iterable[str], open_fields: frozenset[OpenField]) -> Json:
    """Returns the schema of a request that may name these models."""
    names = sorted(names)
    closed = set(OpenField) - open_fields
    fields = {
        name: field for name, field in schema.get("properties", {}).items() if name not in closed
    }
    fields["model"] = {"type": "string", "enum": names}
    required = set(schema.get("required", ())) | ({"model"} if len(names) > 1 else set())
    return schema | {"properties": fields, "required": sorted(required)}


def _references(node: object) -> Iterator[str]:
    """Yields the names of the schemas that a document refers to."""
    if isinstance(node, dict):
        for key, value in node.items():
            found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if key == "$ref" and found is not None:
                yield found[1]
            else:
                yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


@cache
def _vllm() -> Json:
    described: Json = json.loads((Path(__file__).parent / "vllm_api.json").read_text())
    return described
