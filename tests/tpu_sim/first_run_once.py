"""The engine step of the script for the first run, in a process of its own.

    python -m tests.tpu_sim.first_run_once MODEL

Prints what it has measured as one JSON object, its last line.
"""

import asyncio
import json
import sys

from scripts.first_tpu_run import run_engine
from serving.artifacts.model_config_file import find_model_config
from serving.domain.topology import slice_shape
from serving.tpu.model_facts import model_facts
from serving.tpu.plan import plan_engine
from serving.tpu.requirements import EngineRequirements

# The script's request has 512 tokens, and is answered by 64.
ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
}


def main(model: str) -> None:
    config = find_model_config(model)
    assert config is not None
    requirements = EngineRequirements(model, slice_shape("v6e", "2x2"), args=ENGINE_ARGS)
    plan = plan_engine(requirements, model_facts(config))
    print(json.dumps(asyncio.run(run_engine(plan))))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
