"""HTTPS, and web pages of other origins: neither unless it is asked for."""

import ssl
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import trustme

from router.cors import BadOrigin, check_origins
from router.http_tls import BadHttpTLS, HttpTLS
from tests.router.conftest import StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_refusals import error_of
from tests.tls_files import write_tls_files

PAGE = "https://chat.example.org"
ASKING = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_no_page_may_use_it(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        asked = await router.http.options("/v1/chat/completions", headers=ASKING)
        error_of(asked, 405)
        told = await router.http.get("/v1/models", headers={"origin": PAGE})
        for response in (asked, told):
            assert not [name for name in response.headers if name.startswith("access-control")]


async def test_the_pages_that_are_named_may(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, cors_origin=(PAGE,), max_stops=1) as router,
    ):
        asked = await router.http.options("/v1/chat/completions", headers=ASKING)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        router.http.headers["origin"] = PAGE
        answers = [
            await router.chat(),
            await router.chat(stream=True),
            await router.complete(stop=["a", "b"]),
            await router.http.get("/nowhere"),
        ]
        assert [response.status_code for response in answers] == [200, 200, 400, 404]
        for response in answers:
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-baton-request-id" in response.headers["access-control-expose-headers"]
        router.http.headers["origin"] = "https://elsewhere.example.org"
        told = await router.http.get("/v1/models")
        assert "access-control-allow-origin" not in told.headers
        asked = await router.http.options(
            "/v1/models", headers={**ASKING, "origin": "https://elsewhere.example.org"}
        )
        assert asked.status_code == 400


def test_origins_that_no_browser_sends() -> None:
    check_origins(["*", PAGE, "http://localhost:3000"])
    for origin in ("chat.example.org", f"{PAGE}/", "ftp://x", "https://"):
        with pytest.raises(BadOrigin, match="--cors-origin"):
            check_origins([origin])


async def test_https(start_router: StartRouter, answer: Sequence[int], tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key, ca = write_tls_files(tmp_path / "router", authority, "127.0.0.1")
    tls = HttpTLS.from_files(str(cert), str(key))
    assert tls is not None
    trusting = ssl.create_default_context(cafile=str(ca))
    async with fake_cluster(answer) as cluster, start_router(cluster, (tls, trusting)) as router:
        assert (await router.chat()).status_code == 200
        assert (await router.chat(stream=True)).text.endswith("[DONE]\n\n")
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{router.url}/healthz")
            with pytest.raises(httpx.RemoteProtocolError):
                await stranger.get(f"{router.url}/healthz".replace("https", "http"))


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key, ca = write_tls_files(tmp_path / "a", trustme.CA(), "127.0.0.1")
    other = write_tls_files(tmp_path / "b", trustme.CA(), "127.0.0.1")[1]
    assert HttpTLS.from_files("", "") is None
    for files in ((cert, ""), ("", key), (cert, other), (cert, tmp_path / "none"), (key, key)):
        with pytest.raises(BadHttpTLS, match="--http-tls"):
            HttpTLS.from_files(*map(str, files))
    assert ca
