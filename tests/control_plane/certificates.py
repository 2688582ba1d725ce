"""A certificate authority for one test run: certificates of the API server and its clients."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=1)


class Authority:
    """Signs certificates and writes them below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("test-ca")
        builder = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.ca_file = folder / "ca.crt"
        self._write(self.ca_file, builder)

    def server(self, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key for a server at this IP address."""
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        return self._issue("server", ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, user: str) -> tuple[Path, Path]:
        """Certificate and key by which the server knows `user`."""
        return self._issue(user, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(
        self, name: str, usage: x509.ObjectIdentifier, *extensions: x509.ExtensionType
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(_named(name), key)
        for extension in (x509.ExtendedKeyUsage([usage]), *extensions):
            builder = builder.add_extension(extension, critical=False)
        certificate, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        self._write(certificate, builder)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, key_file

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
        )

    def _write(self, path: Path, builder: x509.CertificateBuilder) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
