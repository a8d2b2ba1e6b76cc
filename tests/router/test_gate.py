"""Keys over HTTP: who comes in, what is told, what is open, what is never said; and reloading."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from router import key_source
from router.key_source import KeySource
from router.keys import BadKeys, line_of, new_key
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, fake_cluster, until

PATIENT = {"inactivity_s": 20.0, "status_timeout_s": 20.0, "ready_wait_s": 20.0}
"""A machine that is busy with other things is not what is tested here."""

KEY, OTHER, OPERATOR = new_key(), new_key(), new_key()


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def lines(*words: str) -> str:
    others = line_of(OTHER, "other", ()), line_of(OPERATOR, "us", ["operator=1"])
    return ";".join([line_of(KEY, "acme", words), *others])


async def ask(router: RunningRouter, key: str = KEY, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 50}
    return await router.http.post("/v1/completions", json=body, headers={**bearing(key), **headers})


async def test_only_who_has_a_key_comes_in(
    start_router: StartRouter, answer: Sequence[int], capfd: pytest.CaptureFixture[str]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=lines(), **PATIENT) as router,
    ):
        assert (await ask(router)).status_code == 200
        wrong: list[dict[str, str]] = [{}, bearing("x"), bearing(KEY + "x")]
        wrong += [
            {"Authorization": "Bearer"},
            {"Authorization": KEY},
            {"Authorization": f"Basic {KEY}"},
            {"api-key": KEY},
        ]
        paths = [
            "/v1/completions",
            "/v1/models",
            "/v1/requests",
            "/v1/ledger",
            "/tokenize",
            "/detokenize",
            "/v1/nowhere",
        ]
        for headers, path in [(one, paths[0]) for one in wrong] + [({}, path) for path in paths]:
            response = await router.http.request("POST", path, headers=headers, json={})
            assert response.status_code == 401
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            assert response.headers["www-authenticate"] == "Bearer"
        two = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")]
        assert (await router.http.get("/v1/models", headers=two)).status_code == 401
        num = router.metric("baton_admission_rejections_total", reason="invalid_api_key")
        assert num == len(wrong) + len(paths) + 1
        for path in (
            "/",
            "/healthz",
            "/readyz",
            "/health",
            "/metrics",
            "/version",
            "/openapi.json",
        ):
            response = await router.http.get(path)
            assert response.status_code == 200
            assert KEY not in response.text
        assert (await router.http.get("/v1/models", headers=bearing(KEY))).status_code == 200
    said = "".join(capfd.readouterr())
    assert KEY not in said
    assert KEY[6:] not in said


async def test_a_tenant_sees_its_own_requests(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=lines(), **PATIENT) as router,
    ):
        mine = (await ask(router)).headers["x-baton-request-id"]
        for path in ("/v1/ledger", "/v1/cluster"):
            statuses = [
                (await router.http.get(path, headers=bearing(key))).status_code
                for key in (KEY, OPERATOR)
            ]
            assert statuses == [403, 200]
        for key, status, num in ((KEY, 200, 1), (OTHER, 404, 0), (OPERATOR, 200, 1)):
            told = await router.http.get(f"/v1/requests/{mine}", headers=bearing(key))
            assert told.status_code == status
            assert KEY not in told.text
            listed = (await router.http.get("/v1/requests", headers=bearing(key))).json()
            assert len(listed["data"]) == num


async def test_limits_of_a_key_and_their_headers(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    limits = lines("requests_per_min=3", "tokens_per_min=60000")
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=limits, **PATIENT) as router,
    ):
        for left in ("2", "1", "0"):
            response = await ask(router)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-remaining-requests"] == left
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert int(response.headers["x-ratelimit-remaining-tokens"]) > 59000
        refused = await ask(router)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"].startswith(("59", "1m0"))
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await ask(router, OTHER)).status_code == 200
        served = {"tenant": "acme", "kind": "output"}
        assert router.metric("baton_tenant_tokens_total", **served) == 3 * len(answer)


async def test_tokens_a_minute_and_requests_at_once(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    limits = lines("tokens_per_min=60", "concurrent=1")
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys=limits, **PATIENT) as router,
    ):
        cluster.decodes[0].scripts.append(GenerateCall.hang)
        hanging = asyncio.create_task(ask(router))
        await until(lambda: len(cluster.decodes[0].requests) == 1)
        refused = await ask(router)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "1 requests at once" in refused.json()["error"]["message"]
        hanging.cancel()
        await until(lambda: router.metric("baton_requests_in_flight") == 0)

        # It took the prompt, and 50 tokens that were not written: those are given back.
        assert (await ask(router)).status_code == 200
        refused = await ask(router)
        assert refused.status_code == 429
        assert "60 tokens a minute" in refused.json()["error"]["message"]
        for reason in ("tokens_per_min", "concurrent"):
            assert router.metric("baton_admission_rejections_total", reason=reason) == 1


async def test_open_without_keys_and_shut_with_none(
    start_router: StartRouter, answer: Sequence[int], tmp_path: Path
) -> None:
    (tmp_path / "none").write_text("# nobody yet\n")
    path = str(tmp_path / "none")
    async with fake_cluster(answer) as cluster:
        async with start_router(cluster, **PATIENT) as router:
            assert (await ask(router, "anything")).status_code == 200
            assert router.metric("baton_tenant_tokens_total", tenant="default", kind="prompt") > 0
        async with start_router(cluster, api_keys_file=path, **PATIENT) as router:
            assert (await ask(router)).status_code == 401


async def test_the_file_is_read_again(
    start_router: StartRouter,
    answer: Sequence[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_source, "LOOK_S", 0.05)
    path = tmp_path / "keys"
    path.write_text(line_of(KEY, "acme", ["requests_per_min=60"]) + "\n")
    async with (
        fake_cluster(answer) as cluster,
        start_router(cluster, api_keys_file=str(path), **PATIENT) as router,
    ):
        assert (await ask(router)).headers["x-ratelimit-remaining-requests"] == "59"
        assert (await ask(router, OTHER)).status_code == 401
        with path.open("a") as file:
            file.write(line_of(OTHER, "other", ()) + "\n")
        await until(lambda: router.metric("baton_api_keys") == 2)
        assert (await ask(router, OTHER)).status_code == 200
        assert (await ask(router)).headers["x-ratelimit-remaining-requests"] == "58"

        path.write_text("half a li")
        failed = {"outcome": "failed"}
        await until(lambda: router.metric("baton_api_key_reloads_total", **failed) == 1)
        assert (await ask(router)).status_code == 200
        path.unlink()
        await until(lambda: router.metric("baton_api_key_reloads_total", **failed) == 2)
        assert (await ask(router)).status_code == 200
        path.write_text(line_of(OTHER, "other", ()) + "\n")
        await until(lambda: router.metric("baton_api_keys") == 1)
        assert (await ask(router)).status_code == 401
        assert (await ask(router, OTHER)).status_code == 200


async def test_a_signal_reads_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_source, "LOOK_S", 60.0)
    path = tmp_path / "keys"
    path.write_text("")
    source = KeySource(str(path), "")
    source.start()
    before = signal.signal(signal.SIGHUP, lambda *_: source.reload_soon())
    try:
        path.write_text(line_of(KEY, "acme", ()))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(source.grants) == 1)
    finally:
        signal.signal(signal.SIGHUP, before)
        await source.close()


def test_a_bad_file_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match="cannot be read: No such file"):
        KeySource(str(tmp_path / "none"), "")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadKeys, match="no UTF-8"):
        KeySource(str(tmp_path / "binary"), "")
    with pytest.raises(BadKeys, match="--api-keys, line 2"):
        KeySource("", line_of(KEY, "a", ()) + ";nonsense")


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
async def test_objectives_that_are_nonsense_are_400(
    start_router: StartRouter, answer: Sequence[int], name: str
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster, **PATIENT) as router:
        refused = await ask(router, **{name: "soon"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == name
        assert (await ask(router, **{name: "250.5"})).status_code == 200
        for priority, status in ((-5, 200), ("1", 400), (1.5, 400), (True, 400), (1 << 31, 400)):
            assert (await router.complete(priority=priority)).status_code == status
