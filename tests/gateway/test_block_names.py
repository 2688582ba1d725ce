"""A gateway knows what of a request an engine has, whichever adapter, salt and media it has.

The engine client and the dispatcher are the real ones. What an engine has is named by vLLM's own
functions, of the request as it comes over the link, with the adapter as the engine has it.
"""

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.tokens.block_hashes import first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, joined, key_of
from serving.domain.tokens.paced import paced_token
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.telemetry.request_story import EngineChoice
from serving.link.messages import CacheDelta, CacheSnapshot, TokenRequest
from serving.link.vllm_codec import decode_request, encode_request, request_decoder

from .core_requests import core_request
from .engines import TOKEN_RANGE, ScriptedLink

pytestmark = pytest.mark.imports_vllm

BLOCK = 16
PROMPT = [each % 250 for each in range(600)]
FOLDERS = {"poet": "/engines/poet", "law": "/engines/law"}
TELLING = CacheLayout.of_blocks(BLOCK, first_parent(), FOLDERS.items())
EARLIER = CacheLayout.of_blocks(BLOCK, first_parent())


class Fleet:
    """A client of two engines that tell of their caches in one form."""

    def __init__(self, layout: CacheLayout = TELLING) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=600.0))
        self.client = FleetEngineClient(self.dispatcher, ("generate",), adapters=list(FOLDERS))
        self.links = [
            ScriptedLink(self.dispatcher, engine_id, places=9, cache_layout=layout)
            for engine_id in ("e1", "e2")
        ]
        for link in self.links:
            link.on_cache(CacheSnapshot(b"", is_first=True))

    async def ask(self, request: EngineCoreRequest) -> tuple[ScriptedLink, EngineChoice]:
        """Sends a request; which engine got it, and how that was chosen."""
        before = [len(link.submitted) for link in self.links]
        await self.client.add_request_async(request)
        telemetry = self.dispatcher.telemetry_of(request.request_id)
        assert telemetry is not None
        assert telemetry.choice is not None
        (link,) = [
            link
            for link, count in zip(self.links, before, strict=True)
            if len(link.submitted) > count
        ]
        return link, telemetry.choice

    async def serve(self, request: EngineCoreRequest) -> ScriptedLink:
        """Sends a request and has it served, and the engine tell what it has of it then."""
        link, _ = await self.ask(request)
        keys = vllm_keys(link.submitted[-1])
        link.step(request.sampling_params.max_tokens if request.sampling_params else 1)
        link.on_cache(CacheDelta(joined(keys), b""))
        return link

    async def expected_of(self, request: EngineCoreRequest) -> int | None:
        """What a gateway expects of a request in the cache of the engine that it goes to."""
        link, choice = await self.ask(request)
        self.client.abort([request.request_id])
        link.tell()
        return choice.expected_cached


def asked(
    request_id: str,
    adapter: str | None = None,
    salt: str | None = None,
    images: tuple[tuple[str, int, int], ...] = (),
) -> EngineCoreRequest:
    """A request as vLLM's frontend hands it over; it has adapters in folders of its own."""
    request = core_request(request_id, 5, list(PROMPT))
    request.cache_salt = salt
    if adapter is not None:
        request.lora_request = LoRARequest(adapter, 1 + (adapter == "law"), f"/gateway/{adapter}")
    if images:
        request.mm_features = [
            MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(offset, length))
            for digest, offset, length in images
        ]
    return request


def vllm_keys(sent: TokenRequest) -> list[bytes]:
    """What vLLM calls a request's blocks in its engine core, of those that gateways hear of."""
    decoder = request_decoder()
    request = decode_request(sent, decoder)
    if request.lora_request is not None:
        name = request.lora_request.lora_name
        request.lora_request = LoRARequest(name, 7, FOLDERS[name])
    # On to the engine core, as vLLM's client sends it.
    parts = encode_request(request, MsgpackEncoder())
    in_core = decode_request(
        TokenRequest(sent.request_id, sent.prompt_token_ids, payload=parts), decoder
    )
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    hashed = Request.from_engine_core_request(in_core, hasher)
    every = TELLING.blocks_of_unit
    return [key_of(name) for name in hashed.block_hashes[every - 1 :: every]]


SAME = "".join(["ab", "cd"]) * 16
KINDS = {
    "neither": asked("a"),
    "adapter": asked("a", "poet"),
    "another-adapter": asked("a", "law"),
    "salt": asked("a", salt="acme"),
    "both": asked("a", "poet", "acme"),
    "image": asked("a", images=((SAME, 3, 40),)),
    # Two that are one object here, in one block.
    "images": asked("a", images=((SAME, 3, 5), (SAME, 9, 5))),
    "all": asked("a", "poet", "acme", images=((SAME, 3, 5), ("ef" * 32, 200, 300))),
}


def again(kind: str, request_id: str) -> EngineCoreRequest:
    request = KINDS[kind]
    request.request_id = request_id
    return request


@pytest.mark.parametrize("kind", KINDS)
async def test_second_request_is_expected_where_the_first_was_and_no_other_kind_is(
    kind: str,
) -> None:
    fleet = Fleet()
    has_it = await fleet.serve(again(kind, "first"))
    (other,) = [link for link in fleet.links if link is not has_it]
    # By its line alone the other one would be chosen.
    has_it.tell(backlog_tokens=100)
    other.tell()
    link, choice = await fleet.ask(again(kind, "second"))
    assert (link, choice.expected_cached) == (has_it, 512)
    fleet.client.abort(["second"])
    for number, unlike in enumerate(KINDS.keys() - {kind}):
        assert await fleet.expected_of(again(unlike, f"u{number}")) == 0, unlike
    fleet.client.shutdown()


async def test_names_of_vllm_depend_on_the_folder_that_the_engine_has() -> None:
    """Else a gateway's own folder would do."""
    fleet = Fleet()
    link = await fleet.serve(again("adapter", "first"))
    request = decode_request(link.submitted[0], request_decoder())
    assert request.lora_request is not None
    assert request.lora_request.lora_path == "/gateway/poet"
    at_gateway = CacheLayout.of_blocks(BLOCK, first_parent(), [("poet", "/gateway/poet")])
    elsewhere = Fleet(at_gateway)
    await elsewhere.serve(again("adapter", "first"))
    assert await elsewhere.expected_of(again("adapter", "second")) == 0
    assert await fleet.expected_of(again("adapter", "second")) == 512


async def test_engine_that_tells_of_no_adapters_is_chosen_as_one_of_which_nothing_is_known() -> (
    None
):
    fleet = Fleet(EARLIER)
    await fleet.serve(again("adapter", "first"))
    assert await fleet.expected_of(again("adapter", "second")) is None
    await fleet.serve(again("salt", "third"))
    assert await fleet.expected_of(again("salt", "fourth")) == 512


async def test_moved_request_is_named_with_its_adapter_and_what_it_has_emitted() -> None:
    fleet = Fleet()
    request = asked("a", "poet", "acme")
    assert request.sampling_params is not None
    request.sampling_params.max_tokens = 60
    link, _ = await fleet.ask(request)
    link.step(50)
    sent = link.submitted[0]
    emitted = [paced_token(PROMPT, position, TOKEN_RANGE) for position in range(50)]
    whole = TokenRequest("a", [*sent.prompt_token_ids, *emitted], payload=sent.payload)
    (other,) = [each for each in fleet.links if each is not link]
    other.on_cache(CacheSnapshot(joined(vllm_keys(whole)), is_first=True))
    link.end()
    telemetry = fleet.dispatcher.telemetry_of("a")
    assert telemetry is not None
    assert telemetry.choice is not None
    assert telemetry.choice.expected_cached == 640


async def test_engines_that_read_no_payload_are_told_what_blocks_depend_on() -> None:
    fleet = Fleet()
    link, _ = await fleet.ask(asked("a"))
    assert link.submitted[-1].block_context is None
    link, _ = await fleet.ask(asked("b", "poet", "acme", images=((SAME, 3, 5),)))
    context = link.submitted[-1].block_context
    assert context is not None
    assert (context.adapter, context.salt) == ("poet", "acme")
    assert [(each.digest, each.offset, each.end) for each in context.media] == [(SAME, 3, 8)]
    fleet.client.shutdown()
