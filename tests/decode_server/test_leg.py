"""Decode legs, mostly with prefill legs at the other end: what they say, and what they leave."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import pytest
from structlog.testing import capture_logs

from engine.errors import EngineFault
from engine.kv_copier import KVCopier
from engine.request import ChunkComputed, EngineEvent
from kvfabric.errors import FabricError, HandshakeRefused
from protos import serving_pb2 as pb
from tests.relay import DecodeEvents, Worker, eventually, run_prefill, running_leg, started_worker

PROMPT = random.Random(1).choices(range(17, 49152), k=256)  # four chunks of 64
END_TOKEN = 2  # of the tiny model


@dataclass
class Relay:
    prefill: Worker
    decode: Worker

    async def expected(self, prompt: list[int], max_tokens: int) -> list[int]:
        """By the decode engine alone; it finds nothing cached, and leaves nothing to be found."""
        leg = self.decode.decode_leg(prompt, max_tokens, local=True, cache_salt=token_hex())
        with running_leg(leg) as (events, task):
            await task
            return events.token_ids

    async def assert_all_back(self) -> None:
        await self.prefill.assert_all_back()
        await self.decode.assert_all_back()


@pytest.fixture
async def relay(tiny_llama: Path) -> AsyncIterator[Relay]:
    with started_worker(tiny_llama) as prefill, started_worker(tiny_llama) as decode:
        yield Relay(prefill, decode)
        await prefill.assert_all_back()
        await decode.assert_all_back()


async def ticket(events: DecodeEvents, index: int = 0) -> pb.KVTicket:
    await events.until(lambda: len(events.tickets) > index)
    return events.tickets[index]


async def frames_received(relay: Relay, count: int) -> None:
    await eventually(lambda: relay.decode.fabric.stats().received_frames >= count)


async def test_relay(relay: Relay) -> None:
    expected = await relay.expected(PROMPT, 6)
    with running_leg(relay.decode.decode_leg(PROMPT, 6)) as (events, task):
        prefill = await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, await ticket(events)))
        await task
    assert events.token_ids == expected
    first, shipped = prefill
    assert first.first_token.token_id == expected[0]
    timings = events[-1].finished.timings
    assert timings.kv_nbytes == shipped.shipped.timings.kv_nbytes == 256 * 2 * 2 * 2 * 16 * 4
    assert timings.kv_frames == shipped.shipped.timings.kv_frames > 4
    assert timings.install_ns > 0
    assert timings.attach_ns > 0
    assert_timeline(shipped.shipped.timings, timings)
    assert relay.decode.value("baton_handoff_stage_seconds_count", stage="attach") == 1
    assert relay.prefill.value("baton_handoff_stage_seconds_count", stage="ship") == 1


def assert_timeline(prefill: pb.Timings, decode: pb.Timings) -> None:
    """Both workers are this process: one clock, and stages in the order in which they must be."""
    assert prefill.queue.begin_ns <= prefill.queue.end_ns == prefill.build.begin_ns
    assert prefill.build.end_ns - prefill.build.begin_ns == prefill.build_ns
    assert prefill.queue.end_ns - prefill.queue.begin_ns == prefill.queue_ns
    assert [chunk.num_computed_tokens for chunk in prefill.chunks] == [64, 128, 192, 256]
    ends = [prefill.build.begin_ns]
    for chunk in prefill.chunks:
        assert ends[-1] <= chunk.begin_ns < chunk.end_ns
        ends.append(chunk.end_ns)
    assert ends[-1] == prefill.build.end_ns
    assert prefill.build.begin_ns < prefill.pack.begin_ns < prefill.ship.begin_ns
    assert prefill.pack.begin_ns < prefill.pack.end_ns < prefill.ship.end_ns
    assert prefill.ship.begin_ns < decode.install.end_ns
    # Layers of the last chunk may be installed before it is computed, but token 0 commits.
    assert prefill.chunks[-1].begin_ns < decode.install.end_ns <= decode.attach.begin_ns
    assert prefill.build.end_ns < decode.attach.begin_ns
    assert decode.queue.end_ns < decode.install.begin_ns < decode.install.end_ns
    assert decode.install_ns <= decode.install.end_ns - decode.install.begin_ns
    assert decode.attach.end_ns == decode.decode.begin_ns < decode.decode.end_ns
    assert (list(prefill.transports), prefill.codec) == (["inproc"], "raw")
    assert 1 <= prefill.offers <= prefill.kv_frames + 1


async def test_a_local_prefill_tells_its_times(relay: Relay) -> None:
    with running_leg(relay.decode.decode_leg(PROMPT, 3, local=True)) as (events, task):
        await task
    timings = events[-1].finished.timings
    assert timings.queue.end_ns == timings.build.begin_ns
    assert timings.build.end_ns - timings.build.begin_ns == timings.build_ns > 0
    assert timings.build.end_ns == timings.decode.begin_ns
    assert not timings.HasField("install")
    told = [event.tokens.HasField("timings") for event in events if event.HasField("tokens")]
    assert told == [True] + [False] * (len(told) - 1)


async def test_first_frame_is_installed_before_the_last_chunk_is_computed(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipping overlaps computing: of four chunks, frames of the first are in decode's blocks
    while later ones are still to be computed."""
    with started_worker(smollm2) as prefill, started_worker(smollm2) as decode:
        order = await order_of_chunks_and_installs(Relay(prefill, decode), monkeypatch)
    chunks = [entry for entry in order if entry.startswith("chunk")]
    assert chunks == ["chunk 64", "chunk 128", "chunk 192", "chunk 256"]
    assert order.index("installed") < order.index("chunk 256"), order


async def order_of_chunks_and_installs(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order: list[str] = []
    deliver = relay.prefill.engine.on_events

    def on_events(events: list[EngineEvent]) -> None:
        order.extend(
            f"chunk {e.num_computed_tokens}" for e in events if isinstance(e, ChunkComputed)
        )
        deliver(events)

    scatter = KVCopier._scatter

    def record(self: KVCopier, *copy: object) -> int:
        ns = scatter(self, *copy)  # type: ignore[arg-type]
        order.append("installed")
        return ns

    monkeypatch.setattr(relay.prefill.engine, "on_events", on_events)
    monkeypatch.setattr(KVCopier, "_scatter", record)
    with running_leg(relay.decode.decode_leg(PROMPT, 2)) as (events, task):
        await run_prefill(relay.prefill.prefill_leg(PROMPT, 2, await ticket(events)))
        await task
    return order


async def test_resumed_request_gets_the_rest(relay: Relay) -> None:
    """With outputs delivered the prefill leg samples nothing, and decode computes the tail."""
    expected = await relay.expected(PROMPT, 8)
    delivered = expected[:3]
    before = relay.decode.engine.stats().prompt_tokens_computed
    with running_leg(relay.decode.decode_leg(PROMPT, 8, delivered)) as (events, task):
        leg = relay.prefill.prefill_leg(PROMPT, 8, await ticket(events), delivered)
        prefill = await run_prefill(leg)
        await task
    assert [event.WhichOneof("event") for event in prefill] == ["shipped"]
    assert events.token_ids == expected[3:]
    assert relay.decode.engine.stats().prompt_tokens_computed == before


async def test_resume_after_the_end_token_only_finishes(relay: Relay) -> None:
    leg = relay.decode.decode_leg(PROMPT, 8, [5, END_TOKEN], local=True, ignore_eos=False)
    with running_leg(leg) as (events, task):
        await task
    (event,) = events
    assert event.finished.reason == pb.FINISH_REASON_STOP


async def test_renewed_ticket_asks_only_for_what_is_missing(relay: Relay) -> None:
    """The router gives a leg up in mid transfer; what was installed stays."""
    expected = await relay.expected(PROMPT, 6)
    decode_leg = relay.decode.decode_leg(PROMPT, 6)
    with running_leg(decode_leg) as (events, task):
        first = await ticket(events)
        prefill = asyncio.create_task(run_prefill(relay.prefill.prefill_leg(PROMPT, 6, first)))
        await eventually(lambda: relay.decode.fabric.stats().received_frames >= 2)
        decode_leg.renew(b"not this one....")
        decode_leg.renew(first.transfer_id)
        second = await ticket(events, 1)
        assert second.transfer_id != first.transfer_id
        with pytest.raises(FabricError):
            await prefill
        await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, second))
        await task
    assert 0 < second.first_token < 256
    assert second.first_token % 16 == 0
    assert [t.replaces_lost for t in events.tickets] == [False, True]
    assert events.token_ids == expected
    assert events[-1].finished.timings.kv_nbytes < 256 * 512
    assert relay.decode.value("baton_transfers_lost_total", error="TransferAborted") == 1


async def test_corrupt_frame_costs_another_ticket(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte turned over after the checksum was taken: never installed, sent again."""
    expected = await relay.expected(PROMPT, 6)
    checksummer = relay.prefill.fabric._node._checksummer
    take, taken = checksummer.of, []

    async def corrupt_third(payload: memoryview) -> int:
        taken.append(await take(payload))
        if len(taken) == 3:
            payload[7] ^= 1
        return taken[-1]

    monkeypatch.setattr(checksummer, "of", corrupt_third)
    with running_leg(relay.decode.decode_leg(PROMPT, 6)) as (events, task):
        with pytest.raises(FabricError):
            await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, await ticket(events)))
        await run_prefill(relay.prefill.prefill_leg(PROMPT, 6, await ticket(events, 1)))
        await task
    assert events.token_ids == expected
    assert relay.decode.value("baton_transfers_lost_total", error="ChecksumMismatch") == 1


async def test_token_0_that_ends_the_sample_ships_nothing_more(relay: Relay) -> None:
    """max_tokens of 1 with a ticket: FirstToken says so, and the transfer is dropped."""
    with capture_logs() as said, running_leg(relay.decode.decode_leg(PROMPT, 1)) as (events, task):
        prefill = await run_prefill(relay.prefill.prefill_leg(PROMPT, 1, await ticket(events)))
        assert prefill[0].first_token.finish_reason == pb.FINISH_REASON_LENGTH
        await ticket(events, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line["log_level"] for line in said if line["event"] == "transfer lost"] == ["info"]
    await relay.assert_all_back()


async def test_cancelled_legs_hold_nothing(relay: Relay) -> None:
    """At any moment: before a frame, in mid transfer, after it."""
    for num_frames in (0, 1, 5, 12):
        received = relay.decode.fabric.stats().received_frames
        salt = token_hex()
        with running_leg(relay.decode.decode_leg(PROMPT, 50, cache_salt=salt)) as (events, task):
            leg = relay.prefill.prefill_leg(PROMPT, 50, await ticket(events))
            prefill = asyncio.create_task(run_prefill(leg))
            await frames_received(relay, received + num_frames)
            task.cancel()
            prefill.cancel()
            await asyncio.gather(task, prefill, return_exceptions=True)
        await relay.assert_all_back()


async def test_lost_room_is_found_again(tiny_llama: Path) -> None:
    """Memory pressure takes the room of a promised request: it gets another ticket later, for
    all of it, and the right answer. 20 blocks: an old sequence grows until nothing is left."""
    short, long = PROMPT[:100], PROMPT[:160]
    with (
        started_worker(tiny_llama) as prefill,
        started_worker(tiny_llama, num_blocks=20) as decode,
    ):
        relay = Relay(prefill, decode)
        expected = await relay.expected(long, 4)
        with (
            running_leg(decode.decode_leg(short, 200, local=True, cache_salt="old")) as (
                old,
                old_task,
            ),
            running_leg(decode.decode_leg(long, 4)) as (events, task),
        ):
            await ticket(events)
            await old_task  # it needed 19 blocks, of which the promise had 11
            assert len(old.token_ids) == 200
            second = await ticket(events, 1)
            assert second.first_token == 0
            assert not second.replaces_lost, "no transfer was to blame"
            await run_prefill(prefill.prefill_leg(long, 4, second))
            await task
        assert events.token_ids == expected
        await relay.assert_all_back()


async def test_engine_that_stops_fails_its_legs(tiny_llama: Path) -> None:
    with (
        started_worker(tiny_llama) as decode,
        running_leg(decode.decode_leg(PROMPT, 5)) as (events, task),
    ):
        await ticket(events)
        await asyncio.to_thread(decode.engine.stop)
        with pytest.raises(EngineFault, match="stopped"):
            await task


async def test_kv_of_another_dtype_is_refused_with_a_sentence(
    tiny_llama: Path,
) -> None:
    with (
        started_worker(tiny_llama, dtype="bfloat16") as prefill,
        started_worker(tiny_llama) as decode,
    ):
        with running_leg(decode.decode_leg(PROMPT, 3)) as (events, _):
            leg = prefill.prefill_leg(PROMPT, 3, await ticket(events))
            with pytest.raises(HandshakeRefused) as refusal:
                await run_prefill(leg)
        assert "dtype is bfloat16 here and float32 there" in str(refusal.value)
        assert "layers" not in str(refusal.value)
        await prefill.assert_all_back()
        await decode.assert_all_back()
