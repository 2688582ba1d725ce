"""A process that stands for an engine: compiles programs through JAX's own cache and counts.

    python -m tests.artifacts.compile_cache.compile_programs FOLDER FIRST LAST

Prints one JSON object: JAX's own events, by their last part.
"""

import json
import sys
from collections import Counter

import jax
import jax.numpy as jnp


def main(folder: str, first: int, last: int) -> None:
    counts: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    jax.config.update("jax_compilation_cache_dir", folder)
    results = []
    for number in range(first, last):
        program = jax.jit(lambda x, n=number: (x * (n + 2) + n).sum())
        results.append(float(program(jnp.arange(4.0))))
    prefix = "/jax/compilation_cache/"
    events = {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)}
    print(json.dumps(events | {"results": results}))  # noqa: T201 - its output


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
