"""Names of blocks are those that vLLM gives them, whatever else the contents depend on."""

import random
from typing import Any

import pytest

from serving.domain.tokens.block_hashes import DEFAULT_SEED, block_hashes, first_parent

pytestmark = pytest.mark.imports_vllm

TOKENS = [random.Random(7).randrange(32_000) for _ in range(150)]


def vllm_names(block_size: int, **more: Any) -> list[bytes]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(block_size, sha256)
    params = SamplingParams(max_tokens=8)
    request = Request("a", TOKENS[:100], params, None, block_hasher=hasher, **more)
    request.append_output_token_ids(TOKENS[100:])
    return list(request.block_hashes)


@pytest.mark.parametrize("block_size", [1, 16, 37, 150, 151])
def test_names_are_those_of_vllm(block_size: int) -> None:
    names = list(block_hashes(TOKENS, block_size, first_parent()))
    assert names == vllm_names(block_size)
    assert len(names) == len(TOKENS) // block_size


def test_a_salt_is_in_the_first_block_and_an_adapter_in_each() -> None:
    from vllm.lora.request import LoRARequest

    salt = ("cache_salt", "tenant a")
    salted = list(block_hashes(TOKENS, 16, first_parent(), first_extra=(salt,)))
    assert salted == vllm_names(16, cache_salt="tenant a")
    # Its name and its folder are two strings, as they are when they come over the link.
    adapter = ("lora", "poet", "/adapters/poet")
    adapted = list(block_hashes(TOKENS, 16, first_parent(), extra=(adapter,)))
    request = LoRARequest(lora_name="poet", lora_int_id=1, lora_path="/adapters/poet")
    assert adapted == vllm_names(16, lora_request=request)
    both = list(block_hashes(TOKENS, 16, first_parent(), (adapter,), (adapter, salt)))
    assert both == vllm_names(16, lora_request=request, cache_salt="tenant a")
    assert len({salted[0], adapted[0], both[0]}) == 3


def test_names_go_on_where_others_end() -> None:
    whole = list(block_hashes(TOKENS, 16, first_parent()))
    assert list(block_hashes(TOKENS[64:], 16, whole[3])) == whole[4:]


def test_names_begin_with_what_vllm_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    kv_cache_utils.init_none_hash(sha256)
    assert first_parent() == first_parent(DEFAULT_SEED) == kv_cache_utils.NONE_HASH
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    kv_cache_utils.init_none_hash(sha256)
    assert first_parent("17") == kv_cache_utils.NONE_HASH


def test_no_name_is_computed_that_nobody_asks_for() -> None:
    class Watched(list[int]):
        highest = 0

        def __getitem__(self, key: Any) -> Any:
            self.highest = max(self.highest, key.stop)
            return super().__getitem__(key)

    tokens = Watched(TOKENS)
    names = block_hashes(tokens, 16, first_parent())
    next(names)
    assert tokens.highest == 16
