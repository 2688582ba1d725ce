"""Decides who may open a link: both ends prove the cluster secret, and neither sends it.

    gateway ── Hello(version, gateway_id, nonce) ───────────────> engine host
    gateway <── Challenge(version, engine_id, nonce, proof) ───── engine host
    gateway ── Proof(proof) ────────────────────────────────────> engine host
    gateway <── Welcome(engine_info) ──────────────────────────── engine host

A proof is HMAC-SHA256 under the secret over the prover's role, the version, both names and both
nonces, and in TLS over both certificates: a recorded proof is worthless for a new nonce, one side's
proof is not the other's, and none is worth anything on another connection.
`Refused` takes the place of `Challenge` or `Welcome`.

A secret may have several lines, each a secret of its own: engine hosts prove the first, gateways
accept any and answer with the one that was proved. So a secret is replaced without an interruption:
first every gateway gets the new one behind the old, then engine hosts prove the new one, then the
old one goes.

Owns the proofs and the reasons for a refusal. Does not own sockets, deadlines or the draw of
nonces. Does not encrypt or sign what follows on the open link: `tls` does, and where it is not used
whoever can alter packets has to be kept out by others. Pure: no clock, no I/O, no chance.
"""

import hmac
from enum import StrEnum

import msgspec

from serving.link.errors import HandshakeError
from serving.link.messages import PROTOCOL_VERSION, Challenge, Hello, Proof

NONCE_BYTES = 32

# `Challenge` gives anyone who reaches the port an HMAC to guess the secret against, offline.
MIN_SECRET_BYTES = 16


class Role(StrEnum):
    """The end of the link that a proof speaks for."""

    GATEWAY = "gateway"  # opens the link
    ENGINE = "engine"  # accepts it


def prove(
    secret: bytes,
    role: Role,
    hello: Hello,
    engine_id: str,
    engine_nonce: bytes,
    channel: bytes = b"",
) -> bytes:
    """Returns the proof that `role` holds `secret`, for this one pair of nonces.

    `channel` is what names the encrypted connection (`tls.channel_of`), empty on a plain one.
    """
    parts = [role, hello.version, hello.gateway_id, engine_id, hello.nonce, engine_nonce]
    transcript = msgspec.msgpack.encode([*parts, channel] if channel else parts)
    return hmac.digest(secret, transcript, "sha256")


def validate_secret(secret: bytes) -> None:
    """Refuses a secret short enough to be guessed.

    Raises:
        ValueError: a line has fewer than `MIN_SECRET_BYTES` bytes, or there is none. Configure a
            longer one.
    """
    shortest = min((len(line) for line in secrets_in(secret)), default=0)
    if shortest < MIN_SECRET_BYTES:
        msg = f"cluster secret of {shortest} bytes, at least {MIN_SECRET_BYTES} are needed"
        raise ValueError(msg)


def secrets_in(secret: bytes) -> tuple[bytes, ...]:
    """Returns the secrets in its lines, in their order; the first is the one that is proved."""
    return tuple(line.strip() for line in secret.splitlines() if line.strip())


class GatewayHandshake:
    """The gateway's side. `nonce` is fresh for every link."""

    __slots__ = ("_secrets", "hello")

    def __init__(self, gateway_id: str, secret: bytes, nonce: bytes) -> None:
        validate_secret(secret)
        self._secrets = secrets_in(secret)
        self.hello = Hello(PROTOCOL_VERSION, gateway_id, nonce)

    def answer(self, challenge: Challenge, channel: bytes = b"") -> Proof:
        """Returns the gateway's proof, once the engine host's has been checked.

        `channel` as in `prove`, here and at the other end.

        Raises:
            HandshakeError: the engine host speaks another version or cannot prove itself. Give up.
        """
        _validate_version(challenge.version)
        _validate_nonce(challenge.nonce)
        names = (self.hello, challenge.engine_id, challenge.nonce, channel)
        for secret in self._secrets:
            if hmac.compare_digest(prove(secret, Role.ENGINE, *names), challenge.proof):
                return Proof(prove(secret, Role.GATEWAY, *names))
        raise HandshakeError(_WRONG_PROOF)


class EngineHandshake:
    """The engine host's side. `nonce` is fresh for every link; one challenge, one proof."""

    __slots__ = ("_engine_id", "_expected_proof", "_nonce", "_secret")

    def __init__(self, engine_id: str, secret: bytes, nonce: bytes) -> None:
        validate_secret(secret)
        self._engine_id = engine_id
        self._secret = secrets_in(secret)[0]
        self._nonce = nonce
        self._expected_proof: bytes | None = None

    def challenge(self, hello: Hello, channel: bytes = b"") -> Challenge:
        """Returns the engine host's proof, and the nonce that the gateway has to answer.

        Raises:
            HandshakeError: another version, an unusable nonce, or a second `Hello`. Refuse it.
        """
        if self._expected_proof is not None:
            raise HandshakeError(_OUT_OF_ORDER)
        _validate_version(hello.version)
        _validate_nonce(hello.nonce)
        names = (hello, self._engine_id, self._nonce, channel)
        self._expected_proof = prove(self._secret, Role.GATEWAY, *names)
        own_proof = prove(self._secret, Role.ENGINE, *names)
        return Challenge(PROTOCOL_VERSION, self._engine_id, self._nonce, own_proof)

    def verify(self, proof: Proof) -> None:
        """Accepts the gateway, or refuses it.

        Raises:
            HandshakeError: the proof does not match, or nothing was challenged. Refuse it.
        """
        if self._expected_proof is None:
            raise HandshakeError(_OUT_OF_ORDER)
        if not hmac.compare_digest(self._expected_proof, proof.proof):
            raise HandshakeError(_WRONG_PROOF)


_WRONG_PROOF = "proof does not match: the two ends hold different cluster secrets"
_OUT_OF_ORDER = "handshake messages out of order"


def _validate_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        msg = f"peer speaks link version {version}, this end speaks {PROTOCOL_VERSION}"
        raise HandshakeError(msg)


def _validate_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise HandshakeError(f"nonce of {len(nonce)} bytes, {NONCE_BYTES} are needed")
