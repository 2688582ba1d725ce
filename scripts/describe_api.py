"""Writes what vLLM says of the requests that it takes: `serving/gateway/edge/vllm_api.json`.

`python -m scripts.describe_api --write` after another vLLM is pinned; `--check` says whether that
is due. A gateway does not ask vLLM itself, because that takes a second of its event loop.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import vllm
from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute, Route
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.pooling.classify.api_router import router as classify_router
from vllm.entrypoints.pooling.embed.api_router import router as embed_router
from vllm.entrypoints.pooling.pooling.api_router import router as pooling_router
from vllm.entrypoints.pooling.scoring.api_router import router as scoring_router
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serving.gateway.edge.routes import MODEL_ROUTES

FILE = Path(__file__).parents[1] / "serving/gateway/edge/vllm_api.json"
# Those of a model that pools. Which of them it has depends on the model.
_POOLING: tuple[APIRouter, ...] = (classify_router, embed_router, pooling_router, scoring_router)
_REFERENCE = re.compile(r'"\$ref": "#/components/schemas/([^"]+)"')


def describe() -> str:
    """Returns the file's text: the routes, and each schema that their requests need on a line."""
    described = get_openapi(title="vLLM", version=vllm.__version__, routes=_our_routes())
    routes = {
        path: _operation(operations["post"])
        for path, operations in sorted(described["paths"].items())
    }
    schemas = described["components"]["schemas"]
    needed = sorted(set(_reached(routes, schemas)))
    lines = [f"  {json.dumps(name)}: {json.dumps(_untitled(schemas[name]))}" for name in needed]
    return (
        f'{{"vllm": {json.dumps(vllm.__version__)},\n'
        f'"routes": {json.dumps(routes, indent=1)},\n'
        '"schemas": {\n' + ",\n".join(lines) + "\n}}\n"
    )


def _our_routes() -> list[BaseRoute]:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    app = build_app(args, ("generate",))
    for router in _POOLING:
        app.include_router(router)
    return [
        route for route in app.routes if isinstance(route, Route) and route.path in MODEL_ROUTES
    ]


def _operation(operation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is kept of one route: its request, and what it may be answered with."""
    responses = operation["responses"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    return {
        "summary": operation["summary"],
        "request": _untitled(body),
        "streams": "text/event-stream" in responses["200"].get("content", {}),
        # What does not fit the request is a 400, by a handler of vLLM's that FastAPI knows not of.
        "statuses": sorted(code for code in responses if code not in ("200", "422")),
    }


def _reached(routes: object, schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the schemas that `routes` refer to, directly or not."""
    pending, seen = _REFERENCE.findall(json.dumps(routes)), set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            yield name
            pending += _REFERENCE.findall(json.dumps(schemas[name]))


def _untitled(node: Any) -> Any:  # JSON
    """Returns a schema without titles, which repeat the names of its fields."""
    if isinstance(node, list):
        return [_untitled(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _untitled(below) for name, below in value.items()}
        if key == "properties"
        else _untitled(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }


def main() -> None:
    """Writes the file, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    text = describe()
    if parser.parse_args().write:
        FILE.write_text(text)
    elif FILE.read_text() != text:
        raise SystemExit(f"{FILE}: not what this vLLM says; run it with --write")


if __name__ == "__main__":
    main()
