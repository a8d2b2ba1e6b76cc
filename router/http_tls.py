"""TLS for the HTTP endpoint, out of two PEM files; that of gRPC is runtime/tls.py's."""

import ssl
from dataclasses import dataclass


class BadHttpTLS(Exception):
    """The files cannot be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class HttpTLS:
    """Paths of files that were found to be good."""

    certificate: str
    key: str

    @classmethod
    def from_files(cls, certificate: str, key: str) -> "HttpTLS | None":
        """None if neither is given. Raises BadHttpTLS."""
        if not certificate and not key:
            return None
        if not certificate or not key:
            raise BadHttpTLS("--http-tls-cert and --http-tls-key go together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ssl.SSLError, BadHttpTLS) as error:
            text = f"--http-tls-cert {certificate} with --http-tls-key {key}: {error}"
            raise BadHttpTLS(text) from error
        return cls(certificate, key)


def _no_password() -> str:
    """Asking for one would wait for a terminal."""
    raise BadHttpTLS("the key is encrypted; store it without a password")
