"""An item of a conversation whose part has no type is the client's fault, and no error of ours.

Found by requests made from our description: vLLM asserts that a part has a type.
"""

import pytest

from serving.config.application import GatewayConfig
from serving.domain.models.engine_kind import EngineKind
from serving.gateway.model_version import ModelVersion

from .test_forged_resume import CONFIG
from .test_http_edge import client_of, edge_over
from .test_separate_tenants import ServedBy

pytestmark = pytest.mark.imports_vllm

OUTPUT = {
    "type": "function_call_output",
    "call_id": "c",
    "id": "i",
    "status": "completed",
    "created_by": None,
    "output": [{"text": "a", "type": "input_text"}],
    "role": "assistant",
}


async def test_an_output_in_the_role_of_an_assistant_is_refused() -> None:
    model = CONFIG.model_copy(update={"engine": EngineKind.VLLM, "paced": None})
    version = await ModelVersion.build(model, GatewayConfig())
    async with client_of(edge_over(ServedBy(version))) as client:
        answer = await client.post("/v1/responses", json={"model": "demo", "input": [OUTPUT]})
    assert answer.status_code == 400
    assert "a part of a message" in answer.json()["error"]["message"]
    version.llm.shutdown()
