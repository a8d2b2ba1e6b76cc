"""The admin API over a real socket, and the commands that speak to it."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deploy import admin
from protos import serving_pb2 as pb
from router.admin import build_admin
from router.admin_server import AdminServer, CannotListen, NoToken, read_token
from router.config import RouterConfig
from router.fleet import Fleet
from router.pins import PinBoard
from router.tokenizer import JSONObject
from router.workers import WorkerSet
from tests.router.conftest import StartRouter
from tests.router.fake_both import FakeBoth, join
from tests.router.fake_workers import fake_cluster, until

TOKEN = "a-long-token"


class Operator:
    """Speaks to one admin API, by HTTP and by the command line."""

    def __init__(self, port: int, token_file: Path, http: httpx.AsyncClient) -> None:
        self.http = http
        self._where = ["--admin", f"http://127.0.0.1:{port}", "--admin-token-file", str(token_file)]

    async def run(self, command: str, *argv: str) -> int:
        return await asyncio.to_thread(admin.main, command, [*argv, *self._where])


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


@asynccontextmanager
async def operated(
    start_router: StartRouter, token_file: Path, port: int
) -> AsyncIterator[tuple[FakeBoth, Operator]]:
    """A router over a decode and a prefill worker, and a third that it does not know yet."""
    async with (
        fake_cluster([5, 6]) as cluster,
        start_router(cluster, admin_port=port, admin_token_file=str(token_file)),
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {TOKEN}"}
        ) as http,
    ):
        yield await join(cluster), Operator(port, token_file, http)


async def test_nothing_is_told_without_the_token(
    start_router: StartRouter, token_file: Path, unused_tcp_port: int
) -> None:
    async with operated(start_router, token_file, unused_tcp_port) as (_, operator):
        for given in ("", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", "Bearer \xff"):
            for path in ("/admin/workers", "/admin/nothing"):
                headers = {b"Authorization": given.encode("latin-1")}
                refusal = await operator.http.get(path, headers=headers)
                assert refusal.status_code == 401
                assert refusal.headers["www-authenticate"] == "Bearer"
                assert refusal.json()["error"]["code"] == "invalid_admin_token"
                assert TOKEN not in refusal.text
        assert (await operator.http.get("/admin/workers")).status_code == 200
        assert (await operator.http.get("/admin/nothing")).status_code == 404


async def test_a_worker_joins_flips_drains_and_leaves(
    start_router: StartRouter,
    token_file: Path,
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with operated(start_router, token_file, unused_tcp_port) as (both, operator):

        async def told() -> dict[str, dict[str, object]]:
            workers = (await operator.http.get("/admin/workers")).json()["workers"]
            return {one["name"]: one for one in workers}

        async def seen(**fields: object) -> None:
            async with asyncio.timeout(3):
                for _ in itertools.count():
                    both_told = (await told()).get("both", {})
                    if all(both_told.get(key) == value for key, value in fields.items()):
                        return

        assert list(await told()) == ["decode-0", "prefill-0"]
        assert await operator.run("add", both.address) == 0
        await seen(ready={"decode": True, "prefill": True})
        assert await operator.run("add", both.address) == 0
        assert len(await told()) == 3

        assert await operator.run("flip", "both", "prefill", "--grace-s", "2.5") == 0
        assert both.assignments[-1] == pb.AssignRequest(roles=[pb.ROLE_PREFILL], grace_ms=2500)
        out, err = capsys.readouterr()
        assert "prefill" in out
        assert "2 calls end there, or elsewhere after 2.5 s" in err
        await seen(serves=["prefill"])

        both.status.num_running = both.prefill.status.num_running = 1
        draining = asyncio.create_task(operator.run("drain", both.address))
        await until(lambda: both.assignments[-1] == pb.AssignRequest(grace_ms=30_000))
        await asyncio.sleep(0.1)
        assert not draining.done()
        both.status.num_running = both.prefill.status.num_running = 0
        assert await draining == 0
        assert await operator.run("workers") == 0
        assert "draining" in capsys.readouterr().out

        assert await operator.run("remove", "both") == 0
        assert list(await told()) == ["decode-0", "prefill-0"]


async def test_a_prefix_is_pinned_everywhere_and_let_go(
    start_router: StartRouter,
    token_file: Path,
    unused_tcp_port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with operated(start_router, token_file, unused_tcp_port) as (both, operator):
        text = tmp_path / "prefix"
        text.write_text("Hello all of you, é")
        argv = ("--name", "greeting", "--ttl-s", "60", "--cache-salt", "ours")
        assert await operator.run("pin", str(text), *argv) == 0
        out = capsys.readouterr().out
        assert "greeting" in out
        assert "unimplemented" in out  # the fakes that are there so far have no cache service
        assert await operator.run("add", both.address) == 0  # it hears of the pin as it joins
        await until(lambda: "greeting" in both.pins)
        request = both.pins["greeting"]
        assert len(request.token_ids) > 3
        assert request.cache_salt == "ours"
        assert 50_000 < request.ttl_ms <= 60_000
        assert await operator.run("pins") == 0
        assert "1 of 3 blocks; at most 7 of all pins" in capsys.readouterr().out
        assert await operator.run("pin", str(text), "--system") == 0
        (other,) = both.pins.keys() - {"greeting"}
        assert both.pins[other].token_ids[: len(request.token_ids)] != request.token_ids
        assert await operator.run("unpin", "greeting") == 0
        assert list(both.pins) == [other]
        assert await operator.run("unpin", "greeting") == 1
        assert "'greeting'" in capsys.readouterr().err
        assert await operator.run("pin", str(tmp_path / "nowhere")) == 1


async def test_another_process_at_the_same_address_is_told_of_the_pins(
    start_router: StartRouter, token_file: Path, unused_tcp_port: int
) -> None:
    async with operated(start_router, token_file, unused_tcp_port) as (both, operator):
        assert await operator.run("add", both.address) == 0
        made = await operator.http.post("/admin/pins", json={"prompt": [1, 2, 3], "ttl_s": 9})
        assert made.status_code == 200
        await until(lambda: len(both.pins) == 1)
        both.pins.clear()
        both.status.generation = both.prefill.status.generation = 77
        await until(lambda: len(both.pins) == 1)
        assert next(iter(both.pins.values())).token_ids == [1, 2, 3]


async def test_who_failed_a_call_about_a_pin_is_told_again(
    start_router: StartRouter,
    token_file: Path,
    unused_tcp_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.pins._FIRST_PAUSE_S", 0.05)
    async with operated(start_router, token_file, unused_tcp_port) as (both, operator):
        assert await operator.run("add", both.address) == 0
        first = {"prompt": [1, 2, 3], "ttl_s": 60, "name": "first"}
        await operator.http.post("/admin/pins", json=first)
        await until(lambda: "first" in both.pins)  # it has been heard of
        both.num_failing_pins = 2
        made = (await operator.http.post("/admin/pins", json={**first, "name": "ours"})).json()
        problems = {one["worker"]: one["problem"] for one in made["workers"]}
        assert problems["both"] == "unavailable: not just now"
        await until(lambda: "ours" in both.pins)
        assert not both.num_failing_pins
        both.num_failing_pins = 2
        assert (await operator.http.delete("/admin/pins/ours")).status_code < 300
        assert "ours" in both.pins
        await until(lambda: list(both.pins) == ["first"])


async def test_no_pin_is_made_of_nonsense(
    start_router: StartRouter, token_file: Path, unused_tcp_port: int
) -> None:
    async with operated(start_router, token_file, unused_tcp_port) as (_, operator):
        message = {"role": "user", "content": "Hi"}
        wrong: list[tuple[dict[str, object], str]] = [
            ({}, "prompt"),
            ({"prompt": "a", "messages": [message]}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": {"a": 1}}, "prompt.str"),
            ({"prompt": "a", "ttl_s": 0}, "ttl_s"),
            ({"prompt": "a", "ttl_s": 1e9}, "ttl_s"),
            ({"prompt": "a", "ttl_s": "soon"}, "ttl_s"),
            ({"prompt": "a", "name": "a/b"}, "name"),
            ({"prompt": "a", "more": 1}, "more"),
            ({"messages": [{"role": "cook"}]}, "messages"),
        ]
        for body, param in wrong:
            refusal = await operator.http.post("/admin/pins", json=body)
            assert refusal.status_code == 400, body
            assert str(refusal.json()["error"]["param"]).startswith(param), refusal.text
        assert (await operator.http.get("/admin/pins")).json() == {"pins": []}
        assert (await operator.http.delete("/admin/pins/none")).status_code == 404


async def test_refusals_name_what_is_wrong(
    start_router: StartRouter,
    token_file: Path,
    unused_tcp_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with operated(start_router, token_file, unused_tcp_port) as (_, operator):
        for body, param in (
            ({"address": "nowhere"}, "address"),
            ({}, "address"),
            ({"address": "a:1", "more": 1}, "more"),
        ):
            refusal = await operator.http.post("/admin/workers", json=body)
            assert refusal.status_code == 400
            assert refusal.json()["error"]["param"] == param
        wrong: list[tuple[dict[str, object], str]] = [
            ({"roles": ["cook"]}, "roles.0"),
            ({"roles": [], "grace_s": -1}, "grace_s"),
        ]
        for roles, param in wrong:
            refusal = await operator.http.post("/admin/workers/decode-0/roles", json=roles)
            assert refusal.status_code == 400
            assert refusal.json()["error"]["param"] == param
        assert await operator.run("drain", "nobody") == 1
        assert "'nobody'" in capsys.readouterr().err
        # This fake one has no duty.
        refusal = await operator.http.post("/admin/workers/decode-0/roles", json={"roles": []})
        assert refusal.status_code == 502
        assert "unimplemented" in refusal.json()["error"]["message"]
    assert await operator.run("workers") == 1
    assert "does not answer" in capsys.readouterr().err


def test_without_a_token_there_is_no_admin_api(tmp_path: Path) -> None:
    def config(**changes: object) -> RouterConfig:
        return RouterConfig(model_path="", served_model_name="", **changes)  # type: ignore[arg-type]

    (tmp_path / "empty").write_text("\n")
    assert read_token(config()) == ""
    for file in ("", str(tmp_path / "none"), str(tmp_path / "empty")):
        with pytest.raises(NoToken):
            read_token(config(admin_port=1, admin_token_file=file))


async def test_a_taken_port_is_told(unused_tcp_port: int) -> None:
    workers = WorkerSet([], [], interval_s=1, timeout_s=1)
    board = PinBoard(workers)

    async def read_prompt(body: JSONObject) -> tuple[int, ...]:
        return ()

    app = build_admin(Fleet(workers), board, read_prompt, TOKEN)
    first = AdminServer(app, host="127.0.0.1", port=unused_tcp_port)
    first.start()
    await asyncio.sleep(0)
    with pytest.raises(CannotListen, match=str(unused_tcp_port)):
        AdminServer(app, host="127.0.0.1", port=unused_tcp_port)
    await first.close()
    await workers.close()
