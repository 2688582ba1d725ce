"""Names the engine hosts in Ray, and says whether one is dead: Ray's head is the judge of that."""

import asyncio
import contextlib

import ray

ACTOR_PREFIX = "slicewise-engine:"
_ASK_S = 2.0


def engine_actor(name: str, number: int = 0) -> str:
    """Returns the name in Ray of the host of engine `number`, of those under one `name`.

    That is the id of the placement group around them, where there is one: who finds that finds the
    engines.
    """
    return f"{ACTOR_PREFIX}{name}" + (f".{number}" if number else "")


async def kill_actor(name: str) -> None:
    """Has Ray end the actor of this name, by SIGKILL where it does not answer; it may be gone."""

    def kill() -> None:
        ray.kill(ray.get_actor(name), no_restart=True)

    with contextlib.suppress(ValueError):
        await asyncio.to_thread(kill)


async def is_actor_dead(name: str) -> bool:
    """Returns whether Ray knows no living actor of this name; `False` while it cannot be asked."""
    try:
        async with asyncio.timeout(_ASK_S):
            await asyncio.to_thread(ray.get_actor, name)
    except ValueError:
        return True
    except Exception:  # noqa: BLE001 - whatever ails the head: nobody says that it is dead
        return False
    return False
