"""Mutual TLS for the gRPC links of a cluster, out of three PEM files.

Every process, router or worker, has a certificate and its key, and the authority that signs all of
them; it serves and calls nobody without a certificate of that authority. A worker's certificate
names the host under which the router is told to reach it. New files take effect at a restart.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc


class BadTLS(Exception):
    """The files cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class TLS:
    """PEM, as bytes."""

    certificate: bytes
    key: bytes
    authority: bytes

    @classmethod
    def from_files(cls, certificate: str, key: str, authority: str) -> "TLS | None":
        """None if no file is given. Raises BadTLS."""
        paths = (certificate, key, authority)
        if not any(paths):
            return None
        if not all(paths):
            raise BadTLS("--tls-cert, --tls-key and --tls-ca go together")
        context = ssl.create_default_context()
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ssl.SSLError, BadTLS) as error:
            raise BadTLS(f"--tls-cert {certificate} with --tls-key {key}: {error}") from error
        try:
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            raise BadTLS(f"--tls-ca {authority}: {error}") from error
        return cls(*(Path(path).read_bytes() for path in paths))

    def server_credentials(self) -> grpc.ServerCredentials:
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def _no_password() -> str:
    """Asking for one would wait for a terminal."""
    raise BadTLS("the key is encrypted; store it without a password")
