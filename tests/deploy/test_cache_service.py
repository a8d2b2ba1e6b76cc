"""A worker keeps a pinned prefix while others come and go, for as long as it was told."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from deploy import cache_service
from deploy.cache_service import CacheService
from engine.engine import Engine, PinOutcome
from engine.engine_config import EngineConfig
from engine.errors import InvalidRequest
from engine.request import EngineRequest, Leg, RequestId, SamplingParams
from protos import serving_pb2 as pb
from tests.engine.listener import Listener
from tests.router.fake_workers import until

BLOCK, NUM_BLOCKS = 16, 32
PINNED, OTHERS = 1, range(2, 10)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.listener = Listener()
        config = EngineConfig(
            folder,
            device="cpu",
            dtype="float32",
            num_threads=1,
            nice=0,
            num_blocks=NUM_BLOCKS,
            max_model_len=256,
        )
        self.engine = Engine(config, self.listener)
        self.service = CacheService(self.engine)
        self._numbers = itertools.count()

    def prefix(self, first: int) -> tuple[int, ...]:
        """Four blocks, which no prompt with another first token shares."""
        return (first, *range(1, 4 * BLOCK))

    async def ask(self, first: int) -> int:
        """How many of its tokens were cached."""
        before = self.engine.stats().prompt_tokens_hit
        request_id = RequestId(str(next(self._numbers)))
        prompt = (*self.prefix(first), 7)
        self.engine.submit(
            EngineRequest(request_id, Leg.LOCAL, prompt, SamplingParams(max_tokens=1))
        )
        await asyncio.to_thread(self.listener.wait_ended, request_id)
        return self.engine.stats().prompt_tokens_hit - before

    async def flood(self) -> None:
        """More than the cache holds, of others."""
        for first in OTHERS:
            await self.ask(first)

    async def pin(self, ttl_ms: int = 60_000, salt: str = "") -> pb.PinReply:
        request = pb.PinRequest(
            name="it", token_ids=self.prefix(PINNED), ttl_ms=ttl_ms, cache_salt=salt
        )
        return await self.service.Pin(request, None)


@pytest.fixture
def rig(tiny_llama: Path) -> Iterator[Rig]:
    rig = Rig(tiny_llama)
    rig.engine.start()
    try:
        yield rig
        assert not rig.engine.stats().ledger_violations
        assert rig.engine.failure is None
    finally:
        rig.engine.stop()


async def test_a_pinned_prefix_stays_until_it_is_unpinned(rig: Rig) -> None:
    await rig.ask(PINNED)
    await rig.flood()
    assert await rig.ask(PINNED) == 0  # what is not pinned goes
    assert await rig.pin() == pb.PinReply(num_blocks=4, num_cached=4, num_pinned=4, max_pinned=6)
    await rig.flood()
    assert await rig.ask(PINNED) == 4 * BLOCK
    stats = rig.engine.stats()
    assert (stats.pins, stats.blocks.pinned) == (1, 4)
    for was_there in (True, False):
        reply = await rig.service.Unpin(pb.UnpinRequest(name="it"), None)
        assert reply.was_there == was_there
    await rig.flood()
    assert await rig.ask(PINNED) == 0
    assert rig.engine.stats().pins == rig.engine.stats().blocks.pinned == 0


async def test_its_time_ends_by_itself_and_salts_keep_prefixes_apart(rig: Rig) -> None:
    assert await rig.pin(salt="another") == pb.PinReply(num_blocks=4, max_pinned=6)
    await rig.ask(PINNED)
    assert rig.engine.stats().blocks.pinned == 0
    assert (await rig.pin(ttl_ms=300)).num_pinned == 4
    await until(lambda: not rig.engine.stats().pins)
    await rig.flood()
    assert await rig.ask(PINNED) == 0


async def test_the_time_of_a_pin_ends_whose_answer_came_too_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = rig.engine.pin

    def slow(name: str, token_ids: Sequence[int], salt: str, until_s: float) -> Future[PinOutcome]:
        pin(name, token_ids, salt, until_s)
        return Future()

    monkeypatch.setattr(rig.engine, "pin", slow)
    monkeypatch.setattr(cache_service, "ANSWER_S", 0.02)
    with pytest.raises(TimeoutError):
        await rig.pin(ttl_ms=400)
    await until(lambda: rig.engine.stats().pins == 1)
    await until(lambda: not rig.engine.stats().pins)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": ""}, "name"),
        ({"name": "n" * 129}, "name"),
        ({"ttl_ms": 0}, "ttl_ms"),
        ({"ttl_ms": 1 << 50}, "ttl_ms"),
        ({"token_ids": [1] * 257}, "257 tokens"),
    ],
)
async def test_nonsense_is_refused(rig: Rig, fields: dict[str, object], text: str) -> None:
    wrong = {"name": "it", "ttl_ms": 1, "token_ids": [1], **fields}
    with pytest.raises(InvalidRequest, match=text):
        await rig.service.Pin(pb.PinRequest(**wrong), None)  # type: ignore[arg-type]
    assert rig.engine.stats().pins == 0
