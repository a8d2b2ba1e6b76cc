"""The page as files: all there, small, of one origin, with a policy and etags."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from router.page import FOLDER, HEADERS, read_assets
from tests.router.conftest import StartRouter
from tests.router.fake_workers import fake_cluster
from tests.router.test_gate import KEY, OPERATOR, bearing, lines

FILES = sorted(path for path in FOLDER.iterdir())
MAX_LINES = 300
MAX_NBYTES = 120_000


async def test_it_is_served_with_a_policy_and_an_etag(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        page = await router.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "<title>Baton</title>" in page.text
        for name in read_assets():
            asset = await router.http.get(f"/page/{name}")
            assert asset.status_code == 200
            assert asset.content == (FOLDER / name).read_bytes()
            assert all(asset.headers[name] == value for name, value in HEADERS.items())
            known = {"If-None-Match": f'"other", W/{asset.headers["etag"]}'}
            again = await router.http.get(f"/page/{name}", headers=known)
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == asset.headers["etag"]
            other = await router.http.get(f"/page/{name}", headers={"If-None-Match": '"other"'})
            assert other.status_code == 200
        head = await router.http.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == page.headers["content-length"]


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/a/b"]
)
async def test_nothing_else_is(start_router: StartRouter, answer: Sequence[int], path: str) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        missing = await router.http.get(path)
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "invalid_request_error"
        assert (await router.http.post("/")).status_code == 405


async def test_it_needs_no_key_and_what_it_shows_does(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, api_keys=lines()) as router:
        for path, headers, status in (
            ("/", {}, 200),
            ("/page/main.js", {}, 200),
            ("/v1/cluster", {}, 401),
            ("/v1/cluster/events", {}, 401),
            ("/v1/cluster/events", bearing(KEY), 403),
            ("/v1/cluster", bearing(OPERATOR), 200),
        ):
            response = await router.http.get(path, headers=headers)
            assert response.status_code == status, path


def test_the_policy_is_strict() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert not re.search(r"unsafe|\*|https?:|data:|blob:", policy)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_small_and_need_no_other_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    assert path.name in read_assets(), "every file is served"
    outside = [url for url in re.findall(r"https?://[^\s\"')]+", text) if "www.w3.org" not in url]
    assert not outside
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    for name in re.findall(r"""(?:from\s+"\./|/page/)([\w.-]+)""", text):
        assert (FOLDER / name).exists(), f"{path.name} wants {name}"
    if path.suffix == ".html":
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text), "the policy forbids it"


def test_they_are_in_the_package() -> None:
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["router"]
    packed = {path.name for pattern in patterns for path in FOLDER.parent.glob(pattern)}
    assert packed == {path.name for path in FILES}
    assert sum(path.stat().st_size for path in FILES) <= MAX_NBYTES
