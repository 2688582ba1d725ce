"""Requests that wait go to engines by the weights of their keys, from the key to the engine."""

import asyncio
import json

import pytest

from serving.config.api_keys import read_keys
from serving.gateway.edge.auth import ApiKeys

from .engines import ScriptedLink
from .test_separate_tenants import vllm_gateway

pytestmark = pytest.mark.imports_vllm

RECORDS = [
    {"name": "heavy", "key": "k1", "tenant": "heavy", "weight": 3},
    {"name": "light", "key": "k2", "tenant": "light"},
]


async def test_tenants_take_turns_by_the_weights_of_their_keys() -> None:
    keys = ApiKeys(read_keys(json.dumps({"keys": RECORDS})))
    async with vllm_gateway(keys) as (version, client):
        link = ScriptedLink(version.dispatcher, places=0)
        asked = [
            asyncio.create_task(
                client.post(
                    "/v1/completions",
                    json={"model": "demo", "prompt": "A slice is", "max_tokens": 1},
                    headers={"Authorization": f"Bearer {key}"},
                )
            )
            for key in ("k1", "k2")
            for _ in range(8)
        ]
        while version.dispatcher.num_waiting < len(asked):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        link.places = 8
        link.tell()
        sent = [request.tenant for request in link.submitted]
        assert (sent.count("heavy"), sent.count("light")) == (6, 2)
        while version.dispatcher.num_in_flight:
            link.step()
            await asyncio.sleep(0.01)
        assert {(await answer).status_code for answer in asked} == {200}
