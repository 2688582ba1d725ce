"""Names the engine hosts in Ray, and says whether one is dead: Ray's head is the judge of that."""

import asyncio
import contextlib

import ray

ACTOR_PREFIX = "slicewise-engine:"
_ASK_S = 2.0


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
