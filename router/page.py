"""`GET /`: the page, from files that come with the package (router/web/; docs/page.md).

All of it is read once, at the start, and served from memory, each file with an etag of what is in
it. The policy that goes with it allows scripts, styles and calls of this origin, and nothing else:
no inline script, no other host, no frame around it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "web"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Always asked for again, and mostly answered with 304: a router may be another version.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    body: bytes
    media_type: str
    etag: str


def read_assets(folder: Path = FOLDER) -> Mapping[str, Asset]:
    """By file name."""
    return {path.name: _asset(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}


def add_page(app: FastAPI) -> None:
    assets = read_assets()

    async def page(request: Request) -> Response:
        return _answer(request, assets["index.html"])

    async def asset(request: Request) -> Response:
        found = assets.get(request.path_params["name"])
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "Not Found")
        return _answer(request, found)

    # Plain routes: they are not part of the API's document.
    app.add_route("/", page, methods=["GET"])
    app.add_route("/page/{name}", asset, methods=["GET"])


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return Asset(body, _TYPES[path.suffix], etag)


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    if _is_known(request.headers.get("if-none-match", ""), asset.etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _is_known(if_none_match: str, etag: str) -> bool:
    """RFC 9110, 13.1.2: compared weakly."""
    known = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return etag in known or "*" in known
