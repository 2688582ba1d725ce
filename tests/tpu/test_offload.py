"""What a KV cache in the host's memory takes there and of the devices, and how it is started."""

import pytest

from serving.domain.topology import GIB, slice_shape
from serving.tpu.offload import CONNECTOR, block_tokens
from serving.tpu.plan import EnginePlan, plan_engine
from serving.tpu.requirements import EngineRequirements

from .models import LLAMA_8B, facts_of

SHAPE = slice_shape("v6e", "2x2")
# 32 layers of 8 heads of 128, keys and values, in bfloat16: of one token, on all chips.
TOKEN_BYTES = 32 * 2 * 8 * 128 * 2


def planned(*, connector: bool = True, **env: str) -> EnginePlan:
    args = {"max_model_len": 8192, "block_size": 128}
    if connector:
        args |= {"kv_transfer_config": {"kv_connector": CONNECTOR}}
    return plan_engine(EngineRequirements("org/m", SHAPE, args, env), facts_of(LLAMA_8B))


def test_engine_without_one_has_nothing_of_it() -> None:
    plan = planned(connector=False)
    assert (plan.settings.host_cache, plan.host_cache_bytes, plan.settings.env) == (None, 0, ())


def test_it_is_started_with_what_it_does_not_work_without() -> None:
    settings = planned().settings
    assert settings.engine_args["kv_transfer_config"] == {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "tpu_inference.offload.tpu_offload_connector",
        "kv_role": "kv_both",
    }
    assert settings.environment == {
        "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS": "1,2,4,8,16,32,64",
        "TPU_OFFLOAD_NUM_CPU_CHUNKS": "1024",
        "TPU_OFFLOAD_NUM_STAGING_BLOCKS": "128",
    }


def test_what_is_set_by_hand_stays_and_is_counted() -> None:
    plan = planned(TPU_OFFLOAD_NUM_CPU_CHUNKS="4096", TPU_OFFLOAD_NUM_STAGING_BLOCKS="16")
    cache = plan.settings.host_cache
    assert cache is not None
    assert (cache.tokens, cache.staging_tokens) == (4096 * 128, 16 * 128)
    assert plan.host_cache_bytes == 4096 * 128 * TOKEN_BYTES == 64 * GIB


def test_devices_keep_room_free_for_what_is_on_its_way() -> None:
    without, with_it = planned(connector=False).budget, planned().budget
    assert without is not None
    assert with_it is not None
    assert without.cache_bytes - with_it.cache_bytes == 128 * 128 * TOKEN_BYTES // 4


@pytest.mark.parametrize(
    ("length", "num_seqs", "tokens"),
    [
        (256, 8, 16),
        (2048, 64, 128),
        (4096, 64, 256),
        (8192, 256, 256),
        (16_384, 256, 32),
        (32_768, 256, 64),
        (131_072, 256, 256),
        (131_072, 16, 16),
    ],
)
def test_blocks_are_as_long_as_upstream_makes_them(length: int, num_seqs: int, tokens: int) -> None:
    assert block_tokens(length, num_seqs) == tokens
