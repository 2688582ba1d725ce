"""A worker tells its host what it does while it loads, and no start fails of it."""

import asyncio
import os
import subprocess
import sys

import pytest

from serving.domain.slice_lifecycle import LoadStage, SliceLifecycle, SliceState, TransitionError
from serving.engine.host import start_engine
from serving.engine.load_stage import PIPE_VARIABLE, ReportsStages, report_stage, stages_reported_to
from serving.engine.spec import EngineSpec

DEADLINE_S = 30.0
_WORKER = """
from serving.engine.load_stage import report_stage
from serving.domain.slice_lifecycle import LoadStage
report_stage(LoadStage.COMPILING)
"""


async def test_stage_of_a_process_below_arrives() -> None:
    heard: asyncio.Queue[LoadStage] = asyncio.Queue()
    with stages_reported_to(heard.put_nowait):
        command = [sys.executable, "-c", _WORKER]
        await asyncio.to_thread(subprocess.run, command, check=True)
        async with asyncio.timeout(DEADLINE_S):
            assert await heard.get() == LoadStage.COMPILING
    assert PIPE_VARIABLE not in os.environ


async def test_stage_told_while_the_loop_is_busy_arrives_before_the_end() -> None:
    heard: list[LoadStage] = []
    with stages_reported_to(heard.append):
        report_stage(LoadStage.COMPILING)
    assert heard == [LoadStage.COMPILING]


async def test_worker_tells_before_it_measures_its_memory() -> None:
    heard: asyncio.Queue[LoadStage] = asyncio.Queue()

    class Worker:
        def determine_available_memory(self, scale: int = 1) -> int:
            return 42 * scale

    class Telling(ReportsStages, Worker):
        """As our workers are made."""

    with stages_reported_to(heard.put_nowait):
        assert Telling().determine_available_memory(scale=2) == 84
        async with asyncio.timeout(DEADLINE_S):
            assert await heard.get() == LoadStage.COMPILING


@pytest.mark.parametrize("path", [None, "/nowhere/at/all"])
def test_nobody_who_listens_is_no_error(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    if path is not None:
        monkeypatch.setenv(PIPE_VARIABLE, path)
    report_stage(LoadStage.COMPILING)


async def test_paced_engine_loads_and_compiles_as_long_as_it_is_told() -> None:
    loop = asyncio.get_running_loop()
    heard: list[tuple[LoadStage, float]] = []
    started_s = loop.time()
    paced = {"max_model_len": 64, "load_s": 0.02, "compile_s": 0.03}
    engine = await start_engine(
        EngineSpec("m", "nowhere", "local", paced=paced),
        lambda stage: heard.append((stage, loop.time() - started_s)),
    )
    took_s = loop.time() - started_s
    await engine.close()
    [(stage, at_s)] = heard
    assert stage == LoadStage.COMPILING
    assert 0.02 <= at_s <= took_s - 0.03 + 0.001


def test_stages_are_transitions_of_one_state() -> None:
    life = SliceLifecycle.begin(0.0).enter(SliceState.RESERVED, 1.0, "", slice_name="s")
    life = life.enter(SliceState.LOADING, 2.0, "starts")
    life = life.enter(SliceState.LOADING, 5.0, "compiles", stage=LoadStage.COMPILING)
    again = life.enter(SliceState.LOADING, 6.0, "still", stage=LoadStage.COMPILING)
    assert (life.stage, life.entered_at_s, len(life.transitions)) == (LoadStage.COMPILING, 2.0, 4)
    assert (again.reason, len(again.transitions)) == ("still", 4)
    assert life.enter(SliceState.READY, 9.0, "").seconds_by_state(9.0)[SliceState.LOADING] == 7.0
    with pytest.raises(TransitionError, match="no stage"):
        life.enter(SliceState.READY, 9.0, "", stage=LoadStage.COMPILING)
