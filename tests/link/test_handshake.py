import msgspec
import pytest

from serving.link.errors import HandshakeError
from serving.link.handshake import EngineHandshake, GatewayHandshake
from serving.link.messages import PROTOCOL_VERSION, Hello, Proof

SECRET = b"s" * 32
OTHER_SECRET = b"t" * 32
NONCES = (b"g" * 32, b"e" * 32)


def gateway_side(secret: bytes = SECRET, nonce: bytes = NONCES[0]) -> GatewayHandshake:
    return GatewayHandshake("gateway", secret, nonce)


def engine_side(secret: bytes = SECRET, nonce: bytes = NONCES[1]) -> EngineHandshake:
    return EngineHandshake("engine", secret, nonce)


def test_both_sides_with_one_secret_accept_each_other() -> None:
    gateway, engine = gateway_side(), engine_side()
    engine.verify(gateway.answer(engine.challenge(gateway.hello)))


def test_gateway_refuses_an_engine_host_with_another_secret() -> None:
    gateway = gateway_side()
    challenge = engine_side(OTHER_SECRET).challenge(gateway.hello)
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        gateway.answer(challenge)


def test_engine_host_refuses_a_proof_under_another_secret() -> None:
    gateway, engine, liar = gateway_side(OTHER_SECRET), engine_side(), engine_side(OTHER_SECRET)
    engine.challenge(gateway.hello)
    proof = gateway.answer(liar.challenge(gateway.hello))
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        engine.verify(proof)


def test_recorded_proof_is_worthless_for_a_new_nonce() -> None:
    gateway, engine = gateway_side(), engine_side()
    recorded = gateway.answer(engine.challenge(gateway.hello))
    later = engine_side(nonce=b"n" * 32)
    later.challenge(gateway.hello)
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        later.verify(recorded)


def test_engine_hosts_own_proof_sent_back_is_refused() -> None:
    gateway, engine = gateway_side(), engine_side()
    challenge = engine.challenge(gateway.hello)
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        engine.verify(Proof(challenge.proof))


@pytest.mark.parametrize("field", ["gateway_id", "nonce"])
def test_proof_is_bound_to_what_hello_said(field: str) -> None:
    gateway, engine = gateway_side(), engine_side()
    changed = {"gateway_id": "another", "nonce": b"x" * 32}[field]
    challenge = engine.challenge(msgspec.structs.replace(gateway.hello, **{field: changed}))
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        gateway.answer(challenge)


def test_proof_is_bound_to_the_engine_id() -> None:
    gateway, engine = gateway_side(), engine_side()
    challenge = msgspec.structs.replace(engine.challenge(gateway.hello), engine_id="another")
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        gateway.answer(challenge)


def test_other_version_is_refused_with_both_versions_named() -> None:
    hello = Hello(PROTOCOL_VERSION + 1, "gateway", NONCES[0])
    with pytest.raises(HandshakeError, match=f"{PROTOCOL_VERSION + 1}.*{PROTOCOL_VERSION}"):
        engine_side().challenge(hello)


@pytest.mark.parametrize("nonce", [b"", b"short", b"l" * 33])
def test_nonce_of_another_length_is_refused(nonce: bytes) -> None:
    with pytest.raises(HandshakeError, match="nonce"):
        engine_side().challenge(Hello(PROTOCOL_VERSION, "gateway", nonce))


def test_proof_before_hello_and_second_hello_are_refused() -> None:
    engine = engine_side()
    with pytest.raises(HandshakeError, match="out of order"):
        engine.verify(Proof(b""))
    engine.challenge(gateway_side().hello)
    with pytest.raises(HandshakeError, match="out of order"):
        engine.challenge(gateway_side().hello)


def test_short_secret_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="5 bytes"):
        gateway_side(b"guess")


@pytest.mark.parametrize("side", [gateway_side(), engine_side()])
def test_secret_is_not_in_the_representation(side: object) -> None:
    assert "sss" not in repr(side)


@pytest.mark.parametrize(
    ("gateway", "engine"),
    [
        (b"old", b"old"),
        (b"old new", b"old"),
        (b"old new", b"old new"),
        # From here on engine hosts are started with the new one first.
        (b"old new", b"new old"),
        (b"new old", b"old new"),
        (b"new old", b"new old"),
        (b"new", b"new old"),
        (b"new", b"new"),
    ],
)
def test_secret_is_replaced_while_links_are_opened(gateway: bytes, engine: bytes) -> None:
    left, right = gateway_side(_secret_of(gateway)), engine_side(_secret_of(engine))
    right.verify(left.answer(right.challenge(left.hello)))


@pytest.mark.parametrize(("gateway", "engine"), [(b"old", b"new old"), (b"new", b"old new")])
def test_gateway_without_the_proved_secret_refuses(gateway: bytes, engine: bytes) -> None:
    left, right = gateway_side(_secret_of(gateway)), engine_side(_secret_of(engine))
    with pytest.raises(HandshakeError, match="different cluster secrets"):
        left.answer(right.challenge(left.hello))


def test_short_line_of_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster secret of 5 bytes, at least 16"):
        gateway_side(SECRET + b"\nshort")


def _secret_of(words: bytes) -> bytes:
    return b"\n".join(word * 8 for word in words.split())
