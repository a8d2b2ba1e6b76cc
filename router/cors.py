"""Which web pages may use the endpoint from a browser: none, unless `--cors-origin` names them.

A browser asks first (OPTIONS), and without a key: what answers it stands outside of the gate.
"""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

EVERYBODY = "*"
_EXPOSED = ("x-baton-request-id", "retry-after")
"""Headers of answers that pages may read."""
_MAX_AGE_S = 600


class BadOrigin(Exception):
    """An origin that no browser would send; the text says which."""


def check_origins(origins: Sequence[str]) -> None:
    """Raises BadOrigin."""
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != EVERYBODY and (scheme not in ("http", "https") or not host or "/" in host):
            raise BadOrigin(f"--cors-origin {origin}: say for example https://chat.example.org")


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Nothing is added for no origins: pages of others then cannot read answers."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE_S,
        )
