"""Prefix caching as a client sees it: `usage.prompt_tokens_details`, and `cache_salt`."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from protos import serving_pb2 as pb
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_workers import GenerateCall, PrefillCall, fake_cluster


async def usage_of(router: RunningRouter, kind: str, *, stream: bool, **body: object) -> Any:
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await (router.chat(**body) if kind == "chat" else router.complete(**body))
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["usage"]
    *_, last, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))["usage"]


def cached(usage: Any) -> int:
    number = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(number, int)
    return number


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_usage_tells_the_larger_hit(
    start_router: StartRouter, answer: Sequence[int], kind: str, stream: bool
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for prefill_hit, decode_hit in ((0, 0), (16, 0), (0, 32), (48, 32)):
            cluster.relay.prefill_hit, cluster.relay.decode_hit = prefill_hit, decode_hit
            usage = await usage_of(router, kind, stream=stream)
            assert cached(usage) == max(prefill_hit, decode_hit)


async def test_usage_sums_over_prompts_and_covers_a_single_token(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.relay.prefill_hit = 16
        usage = await usage_of(router, "completion", stream=False, prompt=["a", "b", "c"])
        assert cached(usage) == 48
        assert cached(await usage_of(router, "chat", stream=False, max_tokens=1)) == 16


async def test_a_full_hit_is_answered_without_a_ticket(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async def at_once(call: GenerateCall) -> None:
        await call.say_rest(0, hit=64)

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(at_once)
        assert cached(await usage_of(router, "chat", stream=False)) == 64
        assert cluster.prefills[0].requests == []


async def test_what_a_second_leg_finds_is_the_first_one_s_work(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    """Token 0 came from a cold leg whose transfer was lost; decode asks for another one."""

    async def loses(call: GenerateCall) -> None:
        await call.relay.commit(await call.reserve())
        await asyncio.sleep(0.5)  # the client has token 0
        call.relay.prefill_hit = 48
        await call.relay.commit(await call.reserve())
        await call.say_rest(0)

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.decodes[0].scripts.append(loses)
        assert cached(await usage_of(router, "chat", stream=False)) == 0
        assert len(cluster.prefills[0].requests) == 2


async def test_the_salt_reaches_both_workers(
    start_router: StartRouter, answer: Sequence[int]
) -> None:
    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        for salt in ("tenant-a", None):
            await router.chat(cache_salt=salt)
            await router.complete(cache_salt=salt, max_tokens=1)
            expected = salt or ""
            assert cluster.decodes[0].requests[-1].cache_salt == expected
            for request in cluster.prefills[0].requests[-2:]:
                assert request.cache_salt == expected
        refusal = await router.chat(cache_salt="")
        assert refusal.status_code == 400
        assert refusal.json()["error"]["param"] == "cache_salt"


async def test_a_cold_first_token_is_zero(start_router: StartRouter, answer: Sequence[int]) -> None:
    """Workers that say nothing of hits."""

    async def silent(call: PrefillCall) -> None:
        first = pb.FirstToken(token_id=answer[0])
        await call.context.write(pb.PrefillEvent(first_token=first))
        await call.ship()

    async with fake_cluster(answer) as cluster, start_router(cluster) as router:
        cluster.prefills[0].scripts.append(silent)
        assert cached(await usage_of(router, "chat", stream=False)) == 0
