"""Names the engine hosts in Ray, and says whether one is dead: Ray's head is the judge of that."""

import asyncio

import ray

ACTOR_PREFIX = "slicewise-engine:"
_ASK_S = 2.0


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
