"""Every refusal and failure has a status and a body in OpenAI's format."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import grpc
import httpx
import pytest

from router.tokenizer import TextTokenizer
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["x-baton-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["message"]
    return dict(error)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"\xff", JSON, 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', JSON, 400),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"", JSON, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"a=1", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b'{"prompt": "a"}', JSON, 400),
        (b'{"model": "gpt-4", "prompt": "a"}', JSON, 404),
        (b'{"model": "tiny", "prompt": "a", "suffix": "x"}', JSON, 400),
        (b"a" * 2001, JSON, 413),
    ],
)
async def test_bodies(
    start_router: StartRouter, content: bytes, headers: dict[str, str], status: int
) -> None:
    async with (
        fake_cluster(()) as cluster,
        start_router(cluster, max_body_nbytes=200_000 if content[:2] == b"[[" else 2000) as router,
    ):
        response = await router.http.post("/v1/completions", content=content, headers=headers)
        error_of(response, status)
        assert router.metric("baton_requests_total", outcome="rejected") == 1


async def test_a_streamed_body_is_bounded_too(start_router: StartRouter) -> None:
    """One that does not say how long it is."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b"x" * 10_000

    async with fake_cluster(()) as cluster, start_router(cluster, max_body_nbytes=20_000) as router:
        response = await router.http.post("/v1/completions", content=chunks(), headers=JSON)
        error = error_of(response, 413)
        assert "20000 bytes" in str(error["message"])
        assert sent == 10_000_000, "the answer reaches a client that sends first"
        assert (await router.http.get("/healthz")).status_code == 200
        assert len(router.server.server_state.connections) == 1


async def test_a_body_without_end_ends(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster:
        limits = {"max_body_nbytes": 1000, "head_timeout_s": 0.2}
        async with start_router(cluster, **limits) as router:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            heard, seconds = await talk(router, head, *[b"400\r\n" + b"x" * 1024 + b"\r\n"] * 30)
            assert heard.startswith(b"HTTP/1.1 413 ")
            assert heard.count(b"HTTP/1.1") == 1
            assert seconds < 2


async def test_a_body_that_never_ends(start_router: StartRouter) -> None:
    async def chunks() -> object:
        yield b"{"
        await asyncio.sleep(1)

    async with fake_cluster(()) as cluster, start_router(cluster, body_timeout_s=0.1) as router:
        response = await router.http.post("/v1/completions", content=chunks(), headers=JSON)  # type: ignore[arg-type]
        error_of(response, 408)
        assert response.headers["connection"] == "close"


async def talk(router: RunningRouter, *pieces: bytes, pause_s: float = 0.03) -> tuple[bytes, float]:
    """What comes back until the router closes the connection, and how long it took."""
    host, _, port = router.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = asyncio.get_running_loop().time()
    try:
        heard = asyncio.create_task(reader.read())
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(5):
            return await heard, asyncio.get_running_loop().time() - began
    finally:
        writer.close()


HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


async def test_a_head_that_trickles_in_meets_a_deadline(start_router: StartRouter) -> None:
    """However often a byte of it comes; behind an answer too."""
    times = {"head_timeout_s": 0.15, "body_timeout_s": 0.15}
    async with fake_cluster(()) as cluster, start_router(cluster, **times) as router:
        heard, seconds = await talk(router, HEAD, *[b"X-A: b\r\n"] * 8)
        assert heard.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in heard
        assert 0.15 <= seconds < 2
        heard, _ = await talk(router)
        assert heard == b"", "who said nothing is told nothing"
        body = b"Content-Length: 99999\r\n\r\n"
        heard, _ = await talk(router, HEAD + body, *[b"x"] * 8)
        assert heard.startswith(b"HTTP/1.1 200 ")
        assert heard.count(b"HTTP/1.1") == 1
        heard, _ = await talk(router, HEAD + b"\r\n" + HEAD)
        assert heard.count(b"HTTP/1.1 200 ") == heard.count(b"HTTP/1.1 408 ") == 1


async def test_an_idle_connection_and_a_slow_answer_have_their_time(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, head_timeout_s=0.1, request_timeout_s=0.3) as router,
    ):
        assert (await router.http.get("/healthz")).status_code == 200
        (connection,) = router.server.server_state.connections
        await asyncio.sleep(0.2)
        cluster.decodes[0].scripts.append(GenerateCall.hang)
        error_of(await router.complete(), 504)
        assert router.server.server_state.connections == {connection}


async def test_who_asks_for_the_head_alone_gets_it(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        for path in ("/healthz", "/readyz", "/health", "/metrics", "/v1/models"):
            head, whole = await router.http.head(path), await router.http.get(path)
            assert head.status_code == whole.status_code
            assert (head.content, head.headers["content-type"]) == (
                b"",
                whole.headers["content-type"],
            )


async def test_paths_and_methods(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        for path in ("/v1/nowhere", "/v1/completions/", "/healthz/", "/v1/models/"):
            error_of(await router.http.get(path), 404)
        long = error_of(await router.http.get("/" + "x" * 9000), 404)
        assert len(str(long["message"])) < 300
        for path, method in (("/v1/completions", "GET"), ("/v1/models/tiny", "DELETE")):
            refused = await router.http.request(method, path)
            error_of(refused, 405)
            assert refused.headers["allow"] == {"GET": "POST", "DELETE": "GET"}[method]


async def test_a_prompt_that_cannot_fit(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster, start_router(cluster) as router:
        error = error_of(await router.complete(prompt=[5] * 100), 400)
        assert error["code"] == "context_length_exceeded"
        for number in ("100 tokens", "150 tokens", "100 for the prompt", "at least 50"):
            assert number in str(error["message"])


async def test_no_worker_at_all(start_router: StartRouter) -> None:
    async with fake_cluster(()) as cluster:
        for worker in cluster.workers:
            await worker.kill()
        async with start_router(cluster, ready_wait_s=0.1) as router:
            response = await router.chat()
            error_of(response, 503)
            assert response.headers["retry-after"] == "1"
            assert router.metric("baton_requests_total", outcome="unavailable") == 1


async def test_all_attempts_fail(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, max_attempts=2) as router:

        async def abort(call: GenerateCall) -> None:
            await call.fail(grpc.StatusCode.ABORTED)

        cluster.decodes[0].scripts.extend([abort] * 2)
        error_of(await router.complete(stream=True), 503)


async def test_the_time_is_over(start_router: StartRouter, answer: Sequence[int]) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, request_timeout_s=0.2) as router,
    ):
        cluster.decodes[0].scripts.append(GenerateCall.hang)
        error_of(await router.complete(), 504)
        assert router.metric("baton_requests_total", outcome="timeout") == 1


async def test_an_error_after_tokens_is_the_last_event(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, max_attempts=1) as router:

        async def die(call: GenerateCall) -> None:
            await call.relay.commit(await call.reserve())
            await call.tokens(0, answer[:3])
            await until(lambda: router.metric("baton_request_output_tokens_total") == 3)
            await call.fail(grpc.StatusCode.UNAVAILABLE)

        cluster.decodes[0].scripts.append(die)
        response = await router.complete(stream=True)
        assert response.status_code == 200
        last = response.text.removesuffix("\n\n").split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "workers_failed"
        assert "[DONE]" not in response.text


async def test_one_failing_prompt_fails_the_request(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:

        async def refuse(call: GenerateCall) -> None:
            await call.fail(grpc.StatusCode.INVALID_ARGUMENT, "no")

        cluster.decodes[0].scripts.extend([GenerateCall.hang, refuse])
        error_of(await router.complete(prompt=["a", "b"]), 400)


async def test_a_bug_of_ours_is_a_500(
    start_router: StartRouter,
    answer: Sequence[int],
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(text: str) -> tuple[int, ...]:
        raise ZeroDivisionError

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "encode", broken)
            error = error_of(await router.complete(), 500)
        assert error["code"] == "internal_error"
        (record,) = router.router.records.newest_first()
        assert record.request_id in str(error["message"])
        assert "ZeroDivision" not in str(error)
        assert record.status == 500
        assert router.metric("baton_requests_total", outcome="failed") == 1
        assert (await router.complete()).status_code == 200


async def test_junk_on_the_port_leaves_the_next_request_right(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for junk, status in (
            (b"\x00" * 100 + b"\r\n\r\n", 400),
            (b"GET / HTTP/nine\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nNo Name\r\n\r\n", 400),
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 90_000, 431),
        ):
            heard, _ = await talk(router, junk)
            head, _, body = heard.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), head
            assert b"application/json" in head
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        heard, _ = await talk(
            router, HEAD + b"Content-Length: 5\r\n\r\nx", b"\x00" * 9 + b"\r\n\r\n"
        )
        assert heard.startswith(b"HTTP/1.1 200 ")
        assert (await router.complete()).status_code == 200
