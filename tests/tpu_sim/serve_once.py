"""One start of an engine in a process of its own, where JAX reads its variables at import.

    python -m tests.tpu_sim.serve_once MODEL < PROMPTS

Prints one JSON object as its last line: programs found and compiled until the engine was warm, and
the answers.
"""

import asyncio
import json
import sys
from typing import Any

from .engines import answers, greedy, request, running_engine


async def main(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    async with running_engine(model, {}, tensor_parallel_size=4) as engine:
        counts = engine.engine_stats.programs
        assert counts is not None
        asked = [request(f"{n}", prompt, greedy()) for n, prompt in enumerate(prompts)]
        return {
            "hits": counts.hits,
            "misses": counts.misses,
            "answers": await answers(engine, asked),
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)))))  # noqa: T201
