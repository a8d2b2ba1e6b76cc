"""KV by a codec, where the link is slow, and raw where it is not."""

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from engine.config import ModelError
from engine.kv_codec import Codec
from kvfabric.fabric import Fabric
from kvfabric.link_speed import LinkSpeed
from tests.decode_server.test_leg import PROMPT, Relay, ticket
from tests.relay import run_prefill, running_leg, started_worker

RAW_NBYTES = 256 * 2 * 2 * 2 * 16 * 4
SLOW, FAST = 1e4, 1e12  # bytes a second

salts = count()


@pytest.fixture
async def relay(tiny_llama: Path) -> AsyncIterator[Relay]:
    codecs = ("planes", "int8")
    with (
        started_worker(tiny_llama) as prefill,
        started_worker(tiny_llama, kv_codecs=codecs) as decode,
    ):
        yield Relay(prefill, decode)
        await prefill.assert_all_back()
        await decode.assert_all_back()


async def relayed(relay: Relay, *allowed: Codec) -> tuple[list[int], int, str]:
    """Tokens, payload bytes and what the sender says of the codec. Nothing is cached."""
    salt = str(next(salts))
    with running_leg(relay.decode.decode_leg(PROMPT, 6, cache_salt=salt)) as (events, task):
        minted = await ticket(events)
        assert set(minted.codecs) == {Codec.PLANES, Codec.INT8}
        del minted.codecs[:]
        minted.codecs.extend(allowed)
        leg = relay.prefill.prefill_leg(PROMPT, 6, minted, cache_salt=salt)
        shipped = (await run_prefill(leg))[-1].shipped.timings
        await task
    received = events[-1].finished.timings
    assert received.kv_nbytes == shipped.kv_nbytes
    return events.token_ids, received.kv_nbytes, shipped.codec


async def test_the_codec_moves_with_the_measured_link(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await relay.expected(PROMPT, 6)
    for speed, codec in ((None, "raw"), (FAST, "raw"), (SLOW, "planes"), (FAST, "raw")):
        monkeypatch.setattr(LinkSpeed, "nbytes_per_s", speed)
        tokens, nbytes, used = await relayed(relay, Codec.PLANES)
        assert tokens == expected, "lossless, in float32"
        assert used == codec
        assert (nbytes < RAW_NBYTES) == (codec != "raw")


async def test_int8_is_smaller_still_and_only_by_permission(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinkSpeed, "nbytes_per_s", SLOW)
    tokens, nbytes, used = await relayed(relay, Codec.PLANES, Codec.INT8)
    assert used == "int8"
    assert nbytes == RAW_NBYTES * (16 + 4) // 64  # a scale for each 16 values of four bytes
    assert len(tokens) == 6
    _, nbytes, used = await relayed(relay)
    assert (nbytes, used) == (RAW_NBYTES, "raw")


async def test_a_codec_that_is_none_is_refused_at_start(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="zip"), started_worker(tiny_llama, kv_codecs=("zip",)):
        pass


async def test_a_worker_that_is_paced_asks_for_raw_kv(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fabric, "is_paced", True)
    expected = await relay.expected(PROMPT, 6)
    with running_leg(relay.decode.decode_leg(PROMPT, 6, cache_salt="paced")) as (events, task):
        minted = await ticket(events)
        assert not minted.codecs
        leg = relay.prefill.prefill_leg(PROMPT, 6, minted, cache_salt="paced")
        assert (await run_prefill(leg))[-1].shipped.timings.codec == "raw"
        await task
    assert events.token_ids == expected
