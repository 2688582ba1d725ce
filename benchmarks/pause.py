"""How long a stream pauses when its engine is lost: two engines, and one of them is killed."""

import asyncio
import os
import signal
from dataclasses import dataclass

from benchmarks.load import Load, Result, run_load
from tests.e2e.application import Role, RunningApplication, application_args, demo_model

# As many streams as the exactness tests have, half of them on each engine.
LOAD = Load(num_streams=16, num_requests=16, max_tokens=512)
# Streams have begun by then, and have most of their tokens ahead of them.
KILL_AFTER_S = 1.0
VICTIMS = {
    "engine core": Role.ENGINE_CORE,
    "worker": Role.ENGINE_WORKER,
    "engine host": Role.ENGINE_HOST,
}
NUM_KILLS = 2
_MODEL = "slicewise-demo"


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest gap between two chunks of any stream, and how many streams moved."""

    victim: str
    longest_s: float
    usual_s: float
    num_moved: int


def _longest_s(result: Result) -> float:
    return max(max(stream.gaps_s) for stream in result.streams)


def _num_moved(application: RunningApplication) -> int:
    return int(application.fleet()["models"][0]["resumes"])


async def _disturbed(application: RunningApplication, role: Role, seed: int) -> Result:
    load = asyncio.create_task(run_load(application.base_url, _MODEL, LOAD, seed=seed))
    await asyncio.sleep(KILL_AFTER_S)
    os.kill(application.processes(role)[0].pid, signal.SIGKILL)
    return await load


async def run() -> list[Pause]:
    """Every kind of kill, one after the other; each waits until the engine has been replaced."""
    pauses = []
    with RunningApplication(application_args(demo_model()), through="slicewise") as application:
        url = application.base_url
        for seed in range(2):  # both engines warm
            await run_load(url, _MODEL, LOAD, seed=seed)
        for number in range(NUM_KILLS * len(VICTIMS)):
            victim, role = list(VICTIMS.items())[number % len(VICTIMS)]
            usual = await run_load(url, _MODEL, LOAD, seed=100 + number)
            moved = _num_moved(application)
            result = await _disturbed(application, role, seed=200 + number)
            moved = _num_moved(application) - moved
            pauses.append(Pause(victim, _longest_s(result), _longest_s(usual), moved))
            application.wait_ready()
            await run_load(url, _MODEL, LOAD, seed=300 + number)
    return pauses


def report(pauses: list[Pause]) -> str:
    """A markdown table."""
    lines = [
        "| killed | streams moved | longest gap, ms | longest gap of the run before, ms |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {pause.victim} | {pause.num_moved} of {LOAD.num_streams} "
        f"| {pause.longest_s * 1e3:.0f} | {pause.usual_s * 1e3:.0f} |"
        for pause in pauses
    ]
    return "\n".join(lines)
