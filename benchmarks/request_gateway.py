"""One gateway in a process of its own, without Ray and HAProxy: `request_cost` measures it.

It is started by the path of this file, with the tree whose `serving` it runs in `PYTHONPATH`: so
the gateway of another commit is measured by the same program. It serves the edge by uvicorn as
Serve does, logs as a replica of Serve does, and is linked to an engine that another process hosts.

Its one argument is a JSON object: `engine_id`, `engine_address`, `secret`, `gateway_id` and
`log_folder`. It prints its port when the engine is linked, and ends with its standard input.
"""

import asyncio
import gc
import json
import socket
import sys
import time
from typing import Any

import uvicorn
import uvloop
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from serving.config.application import GatewayConfig
from serving.config.models import DeploymentConfig, ModelConfig
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import DashboardUnavailableError
from serving.domain.models.engine_kind import EngineKind
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.edge.readiness import Readiness
from serving.gateway.membership import LinkSettings, Membership
from serving.gateway.served_model import ServedModel
from serving.link.heartbeat import HeartbeatConfig
from serving.telemetry.process_log import log_as_replica

MODEL = "slicewise-demo"
_LINKED_S = 30.0


async def _no_dashboard(_request: PageRequest) -> PageAnswer:
    raise DashboardUnavailableError("nobody asks for it here")


def _ready() -> Readiness:
    return Readiness(is_ready=True, reason="engines take requests")


async def _empty_page(_accept: str) -> tuple[bytes, str]:
    return b"", ""


def _log(folder: str, gateway_id: str) -> None:
    """Logs to a file as Serve lets a replica do it: what it costs belongs to a request."""
    configure_component_logger(
        component_name="gateway",
        component_id=gateway_id,
        logging_config=LoggingConfig(logs_dir=folder),
        max_bytes=1 << 29,
        backup_count=1,
    )
    log_as_replica()


async def _served_model(given: dict[str, Any]) -> tuple[ServedModel, Membership]:
    config = ModelConfig(
        name=MODEL,
        source=f"models/{MODEL}",
        engine=EngineKind.PACED,
        engine_args={"max_model_len": 2048, "dtype": "float32"},
        deployments=(DeploymentConfig(compute_class="local"),),
    )
    model = await ServedModel.build(config, GatewayConfig())
    secret = bytes.fromhex(given["secret"])
    # Seldom: nothing but requests should cost anything.
    settings = LinkSettings(given["gateway_id"], secret, HeartbeatConfig(1.0, 120.0))
    membership = Membership({MODEL: model}, settings)
    life = SliceLifecycle.begin(time.time()).enter(SliceState.RESERVED, time.time(), "")
    life = life.enter(SliceState.LOADING, time.time(), "").enter(SliceState.READY, time.time(), "")
    record = SliceRecord(
        *("r", MODEL, "local", life, "v6e", "2x4"),
        engine_id=given["engine_id"],
        address=tuple(given["engine_address"]),
    )
    membership.apply(Snapshot("1", (record,)))
    dispatcher = model.current.dispatcher
    # Asked, because how a dispatcher tells of it has changed from commit to commit.
    async with asyncio.timeout(_LINKED_S):
        while not dispatcher.has_engine:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
    return model, membership


async def _serve(given: dict[str, Any]) -> None:
    model, membership = await _served_model(given)
    edge = HttpEdge(
        {MODEL: model}, EdgeRules(ApiKeys(()), 1 << 20), _empty_page, dict, _no_dashboard, _ready
    )
    gc.collect()
    gc.freeze()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(
        uvicorn.Config(
            edge,
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=600,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    print(listener.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    await membership.close()


def main() -> None:
    """Serves until its standard input ends."""
    given = json.loads(sys.argv[1])
    _log(given["log_folder"], given["gateway_id"])
    uvloop.run(_serve(given))


if __name__ == "__main__":
    main()
