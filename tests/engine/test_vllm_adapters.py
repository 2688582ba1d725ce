"""LoRA adapters of a real engine: all are loaded before it is ready, or it does not start."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.tokens.block_hashes import BlockContext
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.engine.vllm.engine import VllmEngine, with_room_for
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import encode_request
from tests.e2e.several_models import write_adapter

from .contract import DEADLINE_S, collect
from .vllm_requests import RequestMaker, set_engine_environment, start_adapted_engine

pytestmark = [pytest.mark.starts_engine]


def asked(requests: RequestMaker, request_id: str, adapter: LoRARequest | None) -> TokenRequest:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    core_request = requests.core_request(request_id, [5, 6, 7, 8], params)
    core_request.lora_request = adapter
    payload = encode_request(core_request, MsgpackEncoder())
    return TokenRequest(request_id, [5, 6, 7, 8], [], 12, payload)


async def answer(engine: VllmEngine, request: TokenRequest) -> list[int]:
    await engine.submit(request)
    return (await collect(engine, request.request_id))[request.request_id]


async def test_every_adapter_is_loaded_at_the_start_and_found_by_its_name(tmp_path: Path) -> None:
    """With room for one in a step: vLLM alone would read the other one again within a step."""
    set_engine_environment()
    requests = RequestMaker()
    first, second = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", rank=2)
    engine = await start_adapted_engine(("one", str(first)), ("two", str(second)))
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert set(msgspec.msgpack.decode(await engine.call("list_loras", b""))) == {1, 2}
            for file in (*first.iterdir(), *second.iterdir()):
                file.unlink()
            base = await answer(engine, asked(requests, "base", None))
            # A gateway counts in its own order, and has its own folders.
            one = await answer(engine, asked(requests, "one", LoRARequest("one", 2, "/elsewhere")))
            two = await answer(engine, asked(requests, "two", LoRARequest("two", 1, "/elsewhere")))
            again = await answer(engine, asked(requests, "re", LoRARequest("one", 9, "/elsewhere")))
            assert len({tuple(base), tuple(one), tuple(two)}) == 3
            assert again == one
            with pytest.raises(ValueError, match="adapter 'law' is not one of this engine's"):
                await engine.submit(asked(requests, "law", LoRARequest("law", 1, str(first))))
            assert await answer(engine, asked(requests, "end", None)) == base
            await check_names(engine, asked(requests, "named", LoRARequest("two", 1, "/elsewhere")))
    finally:
        await engine.close()


async def check_names(engine: VllmEngine, request: TokenRequest) -> None:
    """Its cache has the blocks of the adapter `two` by the names that a gateway computes."""
    assert engine.cached is not None
    assert await engine.call("reset_prefix_cache", b"") == b"\xc3"
    prompt = list(range(5, 305))
    tokens = await answer(engine, msgspec.structs.replace(request, prompt_token_ids=prompt))
    while engine.load.num_running:
        await engine.next_step()
    named = NamedBlocks([*prompt, *tokens][:-1], BlockContext("two"))
    assert engine.cached.keys == set(named.keys(engine.cached.layout))
    assert len(engine.cached.keys) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "complaint"),
    [("wide", "rank 32 is greater than max_lora_rank 8"), ("gone", "gone")],
)
async def test_engine_with_an_adapter_that_cannot_be_loaded_does_not_start(
    tmp_path: Path, name: str, complaint: str
) -> None:
    set_engine_environment()
    folder = tmp_path / name
    if name == "wide":
        write_adapter(folder, rank=32)
    with pytest.raises(ValueError, match=f"adapter '{name}' from .*{complaint}"):
        await start_adapted_engine((name, str(folder)))


def test_room_for_all_adapters_is_made_unless_the_operator_has_said_how_much() -> None:
    assert with_room_for(0, {}) == {}
    assert with_room_for(3, {})["max_cpu_loras"] == 3
    assert with_room_for(3, {"max_loras": 4})["max_cpu_loras"] == 4
    assert with_room_for(3, {"max_cpu_loras": 8})["max_cpu_loras"] == 8
