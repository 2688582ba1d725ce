"""Names of blocks are those that vLLM gives them, whatever else the contents depend on."""

import itertools
import random
from typing import Any

import pytest

from serving.domain.tokens.block_hashes import (
    DEFAULT_SEED,
    BlockContext,
    MediaItem,
    block_hashes,
    first_parent,
)

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


PATH = "/adapters/poet"
# Of the 100 tokens of the prompt: two of one kind in a block of 16, one over several blocks, one
# behind another without a gap, and one that goes on to the prompt's end.
MEDIA = (
    MediaItem("".join(["ab", "cd"]), 2, 3),
    MediaItem("".join(["abc", "d"]), 7, 3),
    MediaItem("beef", 14, 40),
    MediaItem("f00d", 54, 2),
    MediaItem("cafe", 90, 10),
)


def names(block_size: int, context: BlockContext) -> list[bytes]:
    extra = context.extra_keys(block_size, PATH)
    return list(block_hashes(TOKENS, block_size, first_parent(), extra))


def in_vllm(context: BlockContext) -> dict[str, Any]:
    """What a request of vLLM's has of all that."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    more: dict[str, Any] = {"cache_salt": context.salt}
    if context.adapter is not None:
        more["lora_request"] = LoRARequest(context.adapter, lora_int_id=1, lora_path=PATH)
    if context.media:
        more["mm_features"] = [
            MultiModalFeatureSpec(
                None, "image", item.digest, PlaceholderRange(item.offset, item.num_tokens)
            )
            for item in context.media
        ]
    return more


@pytest.mark.parametrize("block_size", [1, 4, 16, 37, 100])
def test_names_hold_adapter_salt_and_media_as_vllms_do(block_size: int) -> None:
    first = set()
    for adapter, salt, media in itertools.product((None, "poet"), (None, "acme"), ((), MEDIA)):
        context = BlockContext(adapter, salt, media)
        named = names(block_size, context)
        assert named == vllm_names(block_size, **in_vllm(context))
        first.add(named[-1])
    assert len(first) == 8


def test_media_of_a_kind_and_in_any_place_have_the_names_of_vllm() -> None:
    chance = random.Random(5)
    for _ in range(100):
        media, at = [], 0
        while at < 90:
            at += chance.choice([0, 0, 1, 5, 30])
            media.append(MediaItem(f"{chance.randrange(3):064}", at, chance.randrange(1, 20)))
            at = media[-1].end
        media = [item for item in media if item.end <= 100]
        context, block_size = BlockContext(media=tuple(media)), chance.choice([3, 8, 16])
        assert names(block_size, context) == vllm_names(block_size, **in_vllm(context))


def test_empty_salt_is_none() -> None:
    assert names(16, BlockContext(salt="")) == names(16, BlockContext()) == vllm_names(16)
    assert vllm_names(16, cache_salt="") == vllm_names(16)


@pytest.mark.parametrize("context", [BlockContext(), BlockContext("poet", "acme", MEDIA)])
def test_names_go_on_where_others_end(context: BlockContext) -> None:
    whole = names(16, context)
    for number in range(1, len(whole)):
        extra = context.extra_keys(16, PATH, first=number)
        rest = block_hashes(TOKENS[number * 16 :], 16, whole[number - 1], extra)
        assert list(rest) == whole[number:]


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
