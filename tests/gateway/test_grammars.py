"""Grammars of clients are compiled by a process that may die of them, and by nobody else before."""

import asyncio
import json
import os
import signal
from typing import Any

import msgspec
import pytest

from serving.artifacts.model_source import resolve_source
from serving.domain.errors import MalformedRequestError
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE, HostProcess
from serving.gateway.forks.grammars.judge import GrammarJudge
from serving.gateway.forks.messages import ForkLimits
from serving.gateway.forks.server import ForkServer
from serving.gateway.forks.version_spec import TASKS, VersionSpec

pytestmark = [pytest.mark.imports_vllm, pytest.mark.process, pytest.mark.slow]

DEADLINE_S = 120.0
ARGS = {"max_model_len": 512, "dtype": "float32"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def nested(depth: int) -> dict[str, Any]:
    return SCHEMA if depth == 0 else {"type": "object", "properties": {"a": nested(depth - 1)}}


@pytest.fixture(scope="module")
def loop_of_the_judge() -> Any:
    """One loop for all tests here: the compiler starts once."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def forks(loop_of_the_judge: Any) -> Any:
    source = resolve_source("models/slicewise-demo")
    spec = VersionSpec(
        source, ("demo",), ARGS, {}, (), ("generate",), 512, has_grammars=True, keeps_grammars=True
    )

    async def made() -> ForkServer:
        return ForkServer("demo", TASKS, lambda: msgspec.msgpack.encode(spec))

    forks = loop_of_the_judge.run(made())
    yield forks
    loop_of_the_judge.run(forks.wait_closed())


@pytest.fixture(scope="module")
def judge(forks: ForkServer) -> GrammarJudge:
    return GrammarJudge(forks, ForkLimits(cpu_s=1, wall_s=20.0, memory_bytes=512 * 2**20))


@pytest.fixture
def judged(loop_of_the_judge: Any, judge: GrammarJudge) -> Any:
    def run(**grammar: Any) -> Any:
        async def ask() -> Any:
            async with asyncio.timeout(DEADLINE_S):
                return await judge.judged(grammar)

        return loop_of_the_judge.run(ask())

    return run


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"json_object": True},
        {"regex": "[a-z]{3}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a" | "b"'},
    ],
)
def test_what_engines_keep_is_passed_on_for_their_compiler(judged: Any, grammar: Any) -> None:
    fields = judged(**grammar)
    assert fields["_backend"] == "xgrammar"
    assert fields["_backend_was_auto"] is True


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": {"$ref": "#"}},
        {"grammar": "root ::= root"},
        {"grammar": "no grammar at all"},
        {"regex": "("},
        {"choice": []},
        {"json": {"type": "integer", "maximum": 10**30}},
        {"json": SCHEMA, "regex": "a"},
        {"json": "\ud800"},
        {"regex": "a" * 300_000},
    ],
)
def test_what_no_engine_can_keep_is_refused_with_the_field(judged: Any, grammar: Any) -> None:
    with pytest.raises(MalformedRequestError) as refused:
        judged(**grammar)
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "grammar",
    [
        {"choice": ["x" * 20_000 + str(number) for number in range(12)]},
        {"grammar": "root ::= " + " | ".join(f'"{n}abc{n * 7}"' for n in range(13_000))},
        {"json": {"enum": [f"x{number}" * 4 for number in range(9_000)]}},
    ],
    ids=["choices", "grammar", "schema"],
)
def test_what_takes_too_much_is_ended_and_the_next_one_is_compiled(
    judged: Any, grammar: Any
) -> None:
    with pytest.raises(MalformedRequestError, match="1 s of processor time and 512 MiB"):
        judged(**grammar)
    assert judged(regex="[a-c]{2}")["regex"] == "[a-c]{2}"


def test_compiler_starts_below_an_engine_host_too(
    judged: Any, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process there is watched by a thread (`parent_death_watch`), and forks have one thread."""
    monkeypatch.setenv(HOST_VARIABLE, str(HostProcess.own()))
    forks.close()
    assert judged(regex="below")["regex"] == "below"


def test_compiler_that_died_is_started_again(judged: Any, forks: ForkServer) -> None:
    judged(regex="a")
    before = forks.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    judged(regex="of another")
    assert forks.pid not in (None, before)


def test_same_grammar_is_compiled_once(judged: Any, forks: ForkServer) -> None:
    judged(regex="once")
    pid = forks.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        assert judged(regex="once")["regex"] == "once"
    finally:
        os.kill(pid, signal.SIGCONT)
