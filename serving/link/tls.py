"""Makes the certificates of a link's ends out of the cluster secret, and decides who needs them.

Whoever holds the secret derives from it the key of one authority (HKDF-SHA256, Ed25519), the same
in every process, and signs for itself a certificate with a fresh key. Each end asks for the other's
certificate and trusts that authority alone, in TLS 1.3. So a peer without the secret ends in the
TLS handshake, before anything is sent. The role of the peer is checked at both ends, by `listener`
at the one that accepts: a gateway's certificate opens no host agent's stream. A name is not:
`handshake` proves the engine's.

A certificate is valid from `SKEW_S` before it was made, so that clocks may differ by that, and is
made anew for connections after `RENEW_S`. Private keys are in memory only. Owns keys, certificates
and contexts. Does not own sockets.
"""

import datetime
import hashlib
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from serving.domain.limits import LinkEncryption, needs_tls
from serving.link.connection import FAREWELL_TIMEOUT_S
from serving.link.handshake import secrets_in, validate_secret

# What two hosts' clocks may differ by, in either direction.
SKEW_S = 24 * 3600.0
RENEW_S = 24 * 3600.0
# From the making; a day of use, and the skew.
_VALID_S = RENEW_S + SKEW_S

# Part of the derivation: another text is another authority, which none before trusts.
_DERIVATION = b"slicewise link authority 1"
_AUTHORITY_SINCE = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_UNTIL = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


_TLS_TO_PLAIN = (
    "the peer speaks plainly on a link that is encrypted here: "
    "both ends need the same link.encryption"
)


class TlsRole(StrEnum):
    """What a certificate says that its holder is; the value is the name in it."""

    GATEWAY = "gateway.slicewise"  # opens a link or a control connection
    ENGINE = "engine-host.slicewise"  # accepts them
    HOST_AGENT = "host-agent.slicewise"  # accepts the stream of a host
    HOST_WATCHER = "host-watcher.slicewise"  # opens it

    @property
    def peer(self) -> "TlsRole":
        """The role of who is at the other end."""
        return _OPENERS[self] if self in _OPENERS else _ACCEPTERS[self]


# Who opens the connections that a role accepts, and the other way round.
_OPENERS = {TlsRole.ENGINE: TlsRole.GATEWAY, TlsRole.HOST_AGENT: TlsRole.HOST_WATCHER}
_ACCEPTERS = {opener: accepter for accepter, opener in _OPENERS.items()}


def channel_of(accepting: bytes, opening: bytes) -> bytes:
    """Returns what the proofs of `handshake` are bound to: both ends' certificates, DER.

    Python's ssl has no exporter of keys in TLS 1.3. Each certificate is of a key that only its
    holder has, so these two name the channel as well: who is in the middle has other ones.
    """
    return hashlib.sha256(accepting).digest() + hashlib.sha256(opening).digest()


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """One end's certificate (`certificate`, DER) and the context that has it and its key."""

    context: ssl.SSLContext
    certificate: bytes = field(repr=False)
    made_at_s: float


class Authority:
    """The authority of one secret: signs for this process and is all that it trusts."""

    __slots__ = ("_certificate", "_key")

    def __init__(self, secret: bytes) -> None:
        """Takes one secret, not several lines.

        Raises:
            ValueError: it is short enough to be guessed.
        """
        validate_secret(secret)
        derived = HKDF(hashes.SHA256(), 32, salt=None, info=_DERIVATION).derive(secret)
        self._key = Ed25519PrivateKey.from_private_bytes(derived)
        name = _named("slicewise link")
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(_AUTHORITY_SINCE)
            .not_valid_after(_AUTHORITY_UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, None)
        )

    def issue(self, role: TlsRole, now_s: float) -> TlsIdentity:
        """Returns a fresh key and certificate for `role`, made at `now_s` (seconds since 1970)."""
        key = Ed25519PrivateKey.generate()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_named(role))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_at(now_s - SKEW_S))
            .not_valid_after(_at(now_s + _VALID_S))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([_purpose(role)]), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(role)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, None)
        )
        context = self._context(role)
        _load(context, certificate, key)
        der = certificate.public_bytes(serialization.Encoding.DER)
        return TlsIdentity(context, der, now_s)

    def _context(self, role: TlsRole) -> ssl.SSLContext:
        accepts = role in _OPENERS
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        authority = self._certificate.public_bytes(serialization.Encoding.DER)
        context.load_verify_locations(cadata=authority)
        if accepts:
            # Every connection proves itself; nothing is resumed.
            context.num_tickets = 0
        return context


class TlsEnd:
    """One role's identities in one process, renewed while it lives; one for each secret.

    An end that accepts uses the first secret, as in `handshake`. One that opens tries them in
    order: it refuses an end of another secret before it shows a certificate of its own.
    """

    __slots__ = ("_clock", "_identities", "_secrets", "role")

    def __init__(self, secret: bytes, role: TlsRole, clock: Callable[[], float]) -> None:
        """Takes the cluster secret with all its lines; `clock` is the wall clock, in seconds.

        Raises:
            ValueError: a secret is short enough to be guessed.
        """
        validate_secret(secret)
        secrets = secrets_in(secret)
        self._secrets = secrets[:1] if role in _OPENERS else secrets
        self.role = role
        self._clock = clock
        self._identities: dict[bytes, TlsIdentity] = {}

    def identities(self) -> tuple[TlsIdentity, ...]:
        """Returns an identity for each secret, in their order, fit for a new connection."""
        return tuple(map(self._identity, self._secrets))

    def _identity(self, secret: bytes) -> TlsIdentity:
        now_s = self._clock()
        identity = self._identities.get(secret)
        # A clock that was set back makes a new one as well.
        if identity is None or not 0 <= now_s - identity.made_at_s < RENEW_S:
            identity = self._identities[secret] = Authority(secret).issue(self.role, now_s)
        return identity


class ClientTls:
    """How an end that opens connections encrypts them, with the certificates for it."""

    __slots__ = ("_encryption", "_end")

    def __init__(
        self,
        secret: bytes,
        encryption: LinkEncryption = LinkEncryption.AUTO,
        role: TlsRole = TlsRole.GATEWAY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes the cluster secret with all its lines; `clock` is the wall clock, in seconds.

        Raises:
            ValueError: a secret is short enough to be guessed.
        """
        self._encryption = encryption
        self._end = TlsEnd(secret, role, clock)

    def identities_for(self, host: str) -> tuple[TlsIdentity | None, ...]:
        """Returns what to try in order with a peer that listens on `host`; `None`: plain.

        The next one is to be tried if the certificate of the peer is not trusted.
        """
        return self._end.identities() if needs_tls(self._encryption, host) else (None,)

    def options(self, identity: TlsIdentity | None) -> dict[str, Any]:
        """Returns what asyncio's `create_connection` takes for a connection by that identity."""
        if identity is None:
            return {}
        return {
            "ssl": identity.context,
            "server_hostname": self._end.role.peer.value,
            "ssl_shutdown_timeout": FAREWELL_TIMEOUT_S,
        }


def accepting_end(
    secret: bytes, encryption: LinkEncryption, role: TlsRole, host: str
) -> TlsEnd | None:
    """Returns the end of a port of `role` on `host`; `None`: connections there are plain.

    Raises:
        ValueError: a secret is short enough to be guessed.
    """
    return TlsEnd(secret, role, time.time) if needs_tls(encryption, host) else None


def names_of_peer(connection: ssl.SSLObject) -> tuple[str, ...]:
    """Returns the names in the certificate that the peer has proved."""
    certificate = connection.getpeercert()
    assert certificate, "both ends' contexts demand one"
    alternatives = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
    return tuple(name for kind, name in alternatives if kind == "DNS")


def tls_reason(error: OSError) -> str:
    """Returns what an error of a TLS handshake means for who runs the cluster."""
    text = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the peer's certificate is not of this cluster's secret, role and time: "
            f"{error.verify_message}"
        )
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}:
            return _TLS_TO_PLAIN
        if "ALERT" in reason:
            return f"the peer refuses this end's certificate, another cluster secret's: {text}"
    return f"TLS failed: {text}"


def _purpose(role: TlsRole) -> x509.ObjectIdentifier:
    if role in _OPENERS:
        return ExtendedKeyUsageOID.SERVER_AUTH
    return ExtendedKeyUsageOID.CLIENT_AUTH


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _at(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _load(context: ssl.SSLContext, certificate: x509.Certificate, key: Ed25519PrivateKey) -> None:
    """Gives the context its certificate and key, which Python's ssl reads from files alone."""
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    if hasattr(os, "memfd_create"):
        # A file without a name, in memory: it is gone with its descriptor.
        with os.fdopen(os.memfd_create("link", os.MFD_CLOEXEC), "wb") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return
    with tempfile.NamedTemporaryFile() as file:  # mode 0600; not Linux
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
