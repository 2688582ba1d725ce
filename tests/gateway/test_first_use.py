"""A request finds nothing that a library has put off until its first use.

In a process of its own: what another test has used is there already.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from serving.gateway.edge.auth import ApiKeys
from tests.e2e.application import PROJECT_ROOT

from .engines import ScriptedLink
from .test_answered_tiers import ask
from .test_forged_resume import ROUTES
from .test_separate_tenants import vllm_gateway

pytestmark = pytest.mark.imports_vllm

PROGRAM = """
import asyncio
from tests.gateway.test_first_use import built_by_requests
print(sorted(asyncio.run(built_by_requests())))
"""


def test_models_of_answers_are_built_before_the_first_request() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


async def built_by_requests() -> list[str]:
    """The pydantic models that were not there before one request of each kind, and are since."""
    async with vllm_gateway(ApiKeys(())) as (version, client):
        link = ScriptedLink(version.dispatcher)
        await version.app()
        before = unbuilt()
        assert before  # some that no request needs
        for path in ROUTES:
            for is_streamed in (False, True):
                answer = await ask(client, link, path, stream=is_streamed)
                assert answer.status_code == 200, answer.text
        return [f"{kind.__module__}.{kind.__name__}" for kind in before - unbuilt()]


def unbuilt() -> set[type[BaseModel]]:
    return {kind for kind in descendants(BaseModel) if not kind.__pydantic_complete__}


def descendants(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from descendants(each)
