"""What the fork server of one version of a model does: compile grammars, prepare large bodies."""

import asyncio

import msgspec

from serving.gateway.forks.bodies.prepared_app import PREPARE
from serving.gateway.forks.bodies.preparer import Preparer, PreparingLLM, no_engines
from serving.gateway.forks.grammars.compiler import Compiler
from serving.gateway.forks.grammars.judge import COMPILE
from serving.gateway.forks.messages import Tasks
from serving.gateway.forks.version_spec import VersionSpec
from serving.gateway.frontend import build_frontend, frontend_config


def make_tasks(spec: bytes) -> Tasks:
    """Returns the tasks of a version; `spec` is a `VersionSpec` in msgpack. Takes seconds.

    Raises:
        ValueError: vLLM refuses the version.
    """
    version = msgspec.msgpack.decode(spec, type=VersionSpec)
    config = frontend_config(version.model, version.names, version.engine_args)
    config.model_config.max_model_len = version.max_model_len
    llm = PreparingLLM(config, no_engines(version.supported_tasks), None)
    app = asyncio.run(
        build_frontend(
            llm,
            version.supported_tasks,
            names=version.names,
            adapters=version.adapters,
            frontend_args=version.frontend_args,
            keeps_grammars=version.keeps_grammars,
        )
    )
    tasks = {PREPARE: Preparer(llm, app).outcome_of}
    if version.has_grammars:
        tasks[COMPILE] = Compiler(config).outcome_of
    return tasks
